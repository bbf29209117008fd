"""A JPEG that was cut before its end marker is not taken for a whole one."""

import pytest
from image_files import encode, exif_of
from PIL import Image
from samples import noise

from toolkit.data.decoding import ImageError, decode_image, decode_reduced

TRUNCATED = "image data truncated"


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("RGB", {}),
        ("RGB", {"progressive": True}),
        ("RGB", {"restart_marker_blocks": 3}),
        ("RGB", {"subsampling": 0}),
        ("RGB", {"exif": exif_of(6)}),
        ("L", {}),
        ("CMYK", {}),
    ],
)
@pytest.mark.parametrize(("width", "height"), [(80, 60), (33, 49)])
def test_an_end_marker_behind_half_a_file_does_not_make_it_whole(mode, options, width, height):
    """libjpeg fills what is missing with grey, and warns in a way that nobody sees."""
    data = encode(
        Image.fromarray(noise(height, width)).convert(mode),
        "JPEG",
        **options,
    )
    decode_image(data, thorough=True)
    first = data.index(b"\xff\xda") + 16
    for part in (0.02, 0.3, 0.55, 0.9):
        cut = data[: first + int(part * (len(data) - first - 8))].rstrip(b"\xff") + b"\xff\xd9"
        with pytest.raises(ImageError, match=TRUNCATED):
            decode_image(cut, thorough=True)
        if "progressive" in options and part > 0.5:  # all but the finest scan are there
            continue
        with pytest.raises(ImageError, match=TRUNCATED):
            decode_image(cut)
        with pytest.raises(ImageError, match=TRUNCATED):
            decode_reduced(cut, (8, 8))


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_a_grey_picture_is_whole(mode):
    data = encode(Image.new(mode, (80, 60), "grey"), "JPEG")
    assert decode_image(data).eq(128).all()
    assert decode_reduced(data, (15, 20))[0].eq(128).all()
