"""Decoding of image files into upright 8-bit RGB tensors, or an error that says why a file cannot be decoded."""

import io
import os
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from toolkit.base.files import MAX_IMAGE_PIXELS
from toolkit.base.imports import import_lightly
from toolkit.data.image_sources import Stored
from toolkit.data.jpeg_scans import is_cut
from toolkit.data.sixteen_bits import (
    COLOUR_NOTE,
    UnreadableColours,
    check_readable,
    colour_values,
    grey_values,
    note_of,
    to_8_bits,
)

import_lightly("torchvision.tv_tensors")
from torchvision.io import ImageReadMode, decode_jpeg  # noqa: E402 (after the line above, which makes it fast)

JPEG_START = b"\xff\xd8\xff"
APP1 = 0xE1  # the segment of EXIF, and of XMP
XMP_ORIENTATION = b"tiff:Orientation"
END_OF_IMAGE = b"\xff\xd9"  # the last marker of a JPEG
SAMPLES_PER_PIXEL = 277  # tag of a TIFF file
REDUCTIONS = (8, 4, 2)  # of the sides of a JPEG, at which libjpeg decodes it faster
EXTENSIONS = {
    "JPEG": {".jpg", ".jpeg", ".jpe", ".jfif"},
    "MPO": {".jpg", ".jpeg", ".mpo"},  # two JPEGs in one file, as some cameras write; the first is read
    "PNG": {".png"},
    "BMP": {".bmp", ".dib"},
    "GIF": {".gif"},
    "TIFF": {".tif", ".tiff"},
    "WEBP": {".webp"},
    "PPM": {".ppm", ".pgm", ".pbm", ".pnm"},
}
# Exceptions of Pillow's readers for broken files; OSError, which says more of the cause, is handled separately.
PILLOW_ERRORS = (SyntaxError, ValueError, TypeError, EOFError, LookupError, ArithmeticError)
PILLOW_ERRORS += (struct.error, Image.DecompressionBombError)
IMAGE_SUFFIXES = frozenset().union(*EXTENSIONS.values())
SPECIAL_FILE_TYPES = {stat.S_IFDIR: "folder", stat.S_IFIFO: "pipe (FIFO)", stat.S_IFSOCK: "socket"}
SPECIAL_FILE_TYPES |= dict.fromkeys((stat.S_IFCHR, stat.S_IFBLK), "device")
Image.MAX_IMAGE_PIXELS = None  # Pillow's own limit lets twice as much pass, and could not be raised by the setting


class ImageError(Exception):
    """Error for an image that cannot be decoded.

    reason: a sentence; path: the file, None for bytes.
    """

    def __init__(self, reason: str, path: Path | Stored | None = None):
        self.reason = reason
        self.path = path
        super().__init__(reason if path is None else f"{path}: {reason}")


class ImageProbe(NamedTuple):
    """Properties of an image read from its header.

    size_hw: of the upright image in pixels
    notes: changes that decoding will make
    format: as Pillow names it
    orientation: EXIF's, 1 if the image is stored upright
    """

    size_hw: tuple[int, int]
    notes: tuple[str, ...]
    format: str
    orientation: int = 1


def decode_image(
    source: Path | str | bytes | Stored,
    max_pixels: int = MAX_IMAGE_PIXELS,
    white: int | None = None,
    thorough: bool = False,
) -> torch.Tensor:
    """Decode an image file, or its bytes, to uint8 (3, H, W) RGB with EXIF orientation applied.

    In memory the pixels lie as (H, W, 3), as both decoders give them; torchvision resizes such tensors fastest.

    JPEG (grey and CMYK too) goes through torchvision, the rest through Pillow. 16-bit values are scaled so that `white`
    becomes 255 (None: 65535), as do larger ones; alpha is dropped, the colour under it kept. Raises ImageError for a
    file that is missing, empty, not an image, or incomplete: a truncated image is never filled up with grey. ImageError
    is also raised, before anything is decoded, for an image whose header gives more than `max_pixels`, and for a path
    that is not a file, such as a pipe without a writer.

    thorough: also look for a cut in the last, finest scan of a progressive JPEG, by decoding it twice.
    """
    path, data = read_image_file(source, max_pixels)
    return _decode_whole(data, path, max_pixels, white, thorough)


def decode_reduced(
    source: Path | str | bytes | Stored,
    least_hw: tuple[int, int],
    max_pixels: int = MAX_IMAGE_PIXELS,
    white: int | None = None,
) -> tuple[torch.Tensor, tuple[int, int]]:
    """Decode an image as `decode_image` does, but a large JPEG at a half, a quarter or an eighth of its sides.

    libjpeg then computes fewer pixels, by leaving out the high frequencies of each block. The result always shows the
    whole picture: at a quarter, a side of 1001 pixels becomes one of 250, each of which is 4.004 old pixels long.

    least_hw: height and width in pixels, of the upright image, below which no image is reduced.

    Returns:
        The pixels, uint8 (3, h, w), and the height and width of the upright image in the file. The two sizes are equal
        for an image that is too small for a reduction, and for every format but JPEG, which Pillow cannot reduce.

    Raises:
        ImageError: as `decode_image`. One kind of damage may pass: a broken restart marker inside a JPEG.
    """
    path, data = read_image_file(source, max_pixels)
    if data[:3] == JPEG_START and _may_be_reduced(data, least_hw):
        _check_pixels(_jpeg_size(data), max_pixels, path)
        with suppress(ImageError):  # a damaged or uncommon file: decoding the whole says what is wrong, or succeeds
            reduced = _decode_reduced_jpeg(data, least_hw, path)
            if reduced is not None:
                return reduced
    pixels = _decode_whole(data, path, max_pixels, white)
    return pixels, tuple(pixels.shape[-2:])


def reduction(size_hw: tuple[int, int], least_hw: tuple[int, int]) -> int:
    """Return the largest of 8, 4 and 2 by which both sides can be divided without falling below `least_hw`, or 1.

    It is 2 for even sides only: the pixels of other images are resampled afterwards (see `decode_reduced`), which costs
    at a half of the sides as much as was saved.
    """
    is_even = size_hw[0] % 2 == 0 and size_hw[1] % 2 == 0
    for divisor in REDUCTIONS:
        height = size_hw[0] // divisor
        width = size_hw[1] // divisor
        is_enough = height >= max(1, least_hw[0]) and width >= max(1, least_hw[1])
        if is_enough and (divisor > 2 or is_even):
            return divisor
    return 1


def _may_be_reduced(data: bytearray, least_hw: tuple[int, int]) -> bool:
    """Return whether a JPEG is large enough in one of its orientations, and has its last marker.

    Pillow would decode a file whose last marker is damaged, which torchvision refuses.
    """
    width, height = _jpeg_size(data)
    largest = max(reduction((height, width), least_hw), reduction((width, height), least_hw))
    if largest == 1:
        return False
    segments = [at for _, at in _jpeg_segments(data)]
    return data.rfind(END_OF_IMAGE) > segments[-1]


def _decode_reduced_jpeg(
    data: bytearray, least_hw: tuple[int, int], path: Path | Stored | None
) -> tuple[torch.Tensor, tuple[int, int]] | None:
    """Return the result of `decode_reduced` for a JPEG; None: it is not to be reduced, or cannot be."""
    with _as_image_errors(data, path), Image.open(io.BytesIO(data), formats=("JPEG",)) as image:
        width, height = image.size
        orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
        size_hw = (width, height) if orientation in (5, 6, 7, 8) else (height, width)
        divisor = reduction(size_hw, least_hw)
        reduced_size = (width // divisor, height // divisor)
        if divisor == 1 or image.draft(None, reduced_size) is None:
            return None
        image.load()
        rgb = torch.from_numpy(_to_rgb(image, path)).permute(2, 0, 1)
        _check_scans(data, rgb, path, block=1)  # a resize would mix the last block with others
        if image.size == reduced_size and orientation not in range(2, 9):
            return rgb, size_hw
        if image.size != reduced_size:
            # libjpeg rounds sides up; its last row or column then lies partly outside of the picture
            seen = (0, 0, width / divisor, height / divisor)
            image = image.resize(reduced_size, Image.Resampling.BILINEAR, box=seen)
        ImageOps.exif_transpose(image, in_place=True)  # `pixels_of` copies, since its image belongs to somebody else
        return torch.from_numpy(_to_rgb(image, path)).permute(2, 0, 1), size_hw


def _decode_whole(
    data: bytearray, path: Path | Stored | None, max_pixels: int, white: int | None, thorough: bool = False
) -> torch.Tensor:
    if data[:3] == JPEG_START and _orientation_is_in_exif(data):
        _check_pixels(_jpeg_size(data), max_pixels, path)
        try:
            # torchvision refuses truncated data, and rotates by EXIF only on request
            encoded = torch.frombuffer(data, dtype=torch.uint8)
            pixels = decode_jpeg(encoded, ImageReadMode.RGB, apply_exif_orientation=True)
            _check_scans(data, pixels, path, thorough=thorough)
            return pixels
        except RuntimeError as error:
            if "truncated" in str(error):
                raise ImageError("image data truncated", path) from error
            # an uncommon kind of JPEG, or damage: Pillow decodes it or says what is wrong
    return _decode_with_pillow(data, path, max_pixels, white, thorough)


def _check_scans(
    data: bytearray, pixels: torch.Tensor, path: Path | Stored | None, block: int = 8, thorough: bool = False
) -> None:
    """Raise ImageError for a JPEG that was cut before its end marker; arguments as of `is_cut`."""
    if is_cut(data, list(_jpeg_segments(data)), pixels, block, thorough):
        raise ImageError("image data truncated", path)


def largest_value(source: Path | str | bytes | Stored, max_pixels: int = MAX_IMAGE_PIXELS) -> int:
    """Return the largest 16-bit value of an image for which `probe_image` has a note of `sixteen_bits.NOTES`.

    Raises ImageError as `decode_image` does.
    """
    path, data = read_image_file(source, max_pixels)
    with _as_image_errors(data, path), Image.open(io.BytesIO(data)) as image:
        _check_pixels(image.size, max_pixels, path)
        if image.mode.startswith("I"):
            return int(grey_values(image).max(initial=0))
        try:
            return int(colour_values(image).max(initial=0))
        except UnreadableColours:
            return int(_to_rgb(image, path).max(initial=0)) * 257


def probe_image(source: Path | str | bytes | Stored, max_pixels: int = MAX_IMAGE_PIXELS) -> ImageProbe:
    """Read size, format and notes of an image from its header only.

    Raises ImageError as `decode_image` does, but a truncated image is not noticed.
    """
    path = _place_of(source)
    if isinstance(source, Stored):
        source = bytes(read_image_file(source, max_pixels)[1])
    in_memory = isinstance(source, bytes)
    try:
        with io.BytesIO(source) if in_memory else open_image_file(path, max_pixels) as file, Image.open(file) as image:
            _check_pixels(image.size, max_pixels, path)
            notes = _notes(image)  # before it is loaded
            orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
            is_turned = orientation in (5, 6, 7, 8)
            if is_turned and image.format == "TIFF":  # Pillow turns these itself, when they are opened or loaded
                image.load()
                is_turned = False
            size_hw = image.size if is_turned else image.size[::-1]
            return ImageProbe(size_hw, notes, image.format, orientation)
    except UnidentifiedImageError as error:
        _, data = read_image_file(source, max_pixels)  # says "empty" where that is the reason
        raise ImageError(_no_image(data), path) from error
    except OSError as error:
        raise ImageError(_os_error(error), path) from error
    except PILLOW_ERRORS as error:
        raise ImageError(f"image cannot be read: {error}", path) from error


def open_image_file(path: Path | str, max_pixels: int = MAX_IMAGE_PIXELS) -> io.BufferedReader:
    """Open an image file for reading bytes.

    Raises ImageError for a path that is not a regular file, and for a file that is larger than any image of
    `max_pixels` pixels. Raises OSError if the file cannot be opened.
    """
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        kind = SPECIAL_FILE_TYPES.get(stat.S_IFMT(status.st_mode), "special file")
        raise ImageError(f"not an image file: it is a {kind}", Path(path))
    _check_bytes(status.st_size, max_pixels, Path(path))
    return open(path, "rb")


def read_image_file(
    source: Path | str | bytes | Stored, max_pixels: int = MAX_IMAGE_PIXELS
) -> tuple[Path | Stored | None, bytearray]:
    """Read a whole image file; return (its path or `Stored` place, its content), or (None, content) for given bytes.

    Raises ImageError as `open_image_file` does, and for an empty or unreadable file.
    """
    path = _place_of(source)
    try:
        data = bytearray(source) if isinstance(source, bytes) else _read_bytes(path, max_pixels)
    except OSError as error:
        raise ImageError(_os_error(error), path) from error
    if not data:
        raise ImageError("empty image file (0 bytes)", path)
    return path, data


def _read_bytes(path: Path | Stored, max_pixels: int) -> bytearray:
    if isinstance(path, Stored):
        _check_bytes(path.size, max_pixels, path)
        return bytearray(path.read_bytes())
    with open_image_file(path, max_pixels) as file:
        data = bytearray(os.fstat(file.fileno()).st_size)
        file.readinto(data)
    return data


def _place_of(source: Path | str | bytes | Stored) -> Path | Stored | None:
    if isinstance(source, bytes):
        return None
    return source if isinstance(source, Stored) else Path(source)


def _check_bytes(size: int, max_pixels: int, path: Path | Stored) -> None:
    most = 16 * max_pixels + 2**26  # bytes of a pixel at the very most, and metadata
    if size > most:
        limit = f"more than the {most} of any image of data.max_image_pixels {max_pixels}"
        raise ImageError(f"the file has {size} bytes, {limit}", path)


def _check_pixels(size: tuple[int, int], max_pixels: int, path: Path | Stored | None) -> None:
    width, height = size
    if width * height > max_pixels:
        raise ImageError(f"{width} x {height} pixels are more than data.max_image_pixels {max_pixels}", path)


def _jpeg_segments(data: bytearray) -> Iterator[tuple[int, int]]:
    """Yield (marker, position) of each segment of a JPEG up to the start of its pixels."""
    at = 2
    while at + 9 <= len(data):
        marker = data[at + 1]
        if data[at] != 0xFF or marker in (0x00, 0xFF):  # fill bytes, or garbage, which decoders pass over
            at += 1
            continue
        yield marker, at
        if marker == 0xDA:
            return
        at += 2
        has_content = marker != 0x01 and not 0xD0 <= marker <= 0xD9
        if has_content:
            (length,) = struct.unpack_from(">H", data, at)
            at += length


def _jpeg_size(data: bytearray) -> tuple[int, int]:
    """Return the width and height in the frame header of a JPEG; 0 if there is none before the pixels."""
    for marker, at in _jpeg_segments(data):
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height, width = struct.unpack_from(">HH", data, at + 5)
            return width, height
    return 0, 0


def _orientation_is_in_exif(data: bytearray) -> bool:
    """Return whether torchvision finds the orientation of a JPEG.

    It looks only at the first APP1 segment, and not at XMP, which Pillow reads too.
    """
    if XMP_ORIENTATION in data:
        return False
    for marker, at in _jpeg_segments(data):
        if marker == APP1:
            return data[at + 4 : at + 8] == b"Exif"
    return True


def _decode_with_pillow(
    data: bytearray, path: Path | Stored | None, max_pixels: int, white: int | None, thorough: bool
) -> torch.Tensor:
    with _as_image_errors(data, path), Image.open(io.BytesIO(data)) as image:
        pixels = pixels_of(image, path, max_pixels, white)
        if image.format == "PNG" and b"IEND" not in data:  # Pillow is content once it has every pixel
            raise ImageError("image data truncated", path)
        if image.format in ("JPEG", "MPO"):
            _check_scans(data, pixels, path, thorough=thorough)
        return pixels


def pixels_of(
    image: Image.Image,
    path: Path | Stored | None = None,
    max_pixels: int = MAX_IMAGE_PIXELS,
    white: int | None = None,
) -> torch.Tensor:
    """Return a Pillow image as uint8 (3, H, W) RGB, with EXIF orientation applied.

    The rule is the same for image files and for images in memory: 16-bit values are scaled so that `white` becomes 255
    (None: 65535), as do larger ones; alpha is dropped, the colour under it kept. Of colours that Pillow has loaded
    only the upper 8 of 16 bits are left, which are not scaled again.

    path: place of the image for error messages.

    Raises ImageError for pixels that are floating point or whole numbers beyond 16 bits, for an image of more than
    `max_pixels` (before anything is decoded), and for a truncated or damaged file, which Pillow reads only now.
    """
    _check_pixels(image.size, max_pixels, path)
    with _as_image_errors(None, path):
        note = note_of(image)
        try:
            check_readable(image)
            if white is not None and note == COLOUR_NOTE:
                rgb = torch.from_numpy(to_8_bits(colour_values(image), white))
                return rgb.permute(2, 0, 1)
        except UnreadableColours as error:
            raise ImageError(str(error), path) from error
        image.load()
        upright = ImageOps.exif_transpose(image)
        rgb = torch.from_numpy(_to_rgb(upright, path, white if note else None))  # (H, W, 3)
        return rgb.permute(2, 0, 1)


@contextmanager
def _as_image_errors(data: bytes | bytearray | None, path: Path | Stored | None) -> Iterator[None]:
    """Raise ImageError for whatever Pillow raises for a damaged file.

    data: the file, to say how it begins; None: Pillow has opened it, so that it is an image.
    """
    try:
        yield
    except (OSError, *PILLOW_ERRORS) as error:
        if data is not None and isinstance(error, UnidentifiedImageError):
            raise ImageError(_no_image(data), path) from error
        # Pillow's words for a short file, in its formats: "image file is truncated", "unrecognized data stream" ...
        reason = "image data truncated" if "truncated" in str(error) else f"image data broken: {error}"
        raise ImageError(reason, path) from error


def _to_rgb(image: Image.Image, path: Path | Stored | None, white: int | None = None) -> np.ndarray:
    """Convert to (H, W, 3) uint8; grey of 16 bits by `to_8_bits`."""
    if image.mode.startswith("I"):  # "I;16", "I;16B", or "I" holding 16 bits
        grey = grey_values(image)
        if grey.size and not 0 <= grey.min() <= grey.max() <= 65535:
            raise ImageError(f"grey values from {grey.min()} to {grey.max()}; expected 8 or 16 bits", path)
        return to_8_bits(grey, white)
    if image.mode == "F":
        raise ImageError("floating-point pixels; expected 8 or 16 bits", path)
    if "transparency" in image.info:
        image = image.convert("RGBA")
    if image.mode == "La":  # Pillow converts it to nothing else
        image = image.convert("LA")
    try:
        rgb = image if image.mode == "RGB" else image.convert("RGB")
        return np.array(rgb)
    except ValueError as error:
        raise ImageError(f"pixels of mode {image.mode}, which have no colours: {error}", path) from error


def _notes(image: Image.Image) -> tuple[str, ...]:
    notes = []
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        notes.append("alpha channel dropped, the colours under it kept")
    deep = note_of(image)
    if deep:
        notes.append(deep)
    elif image.mode.startswith("I"):
        notes.append("grey scaled to 8 bits by the largest value in the file's header")
    if image.mode == "CMYK":
        notes.append("CMYK converted to RGB")
    bands = len(image.getbands())
    stored_bands = image.tag_v2.get(SAMPLES_PER_PIXEL, 1) if image.format == "TIFF" else bands
    if stored_bands > bands:
        notes.append(f"first {bands} of {stored_bands} bands used")
    if image.format != "MPO":
        notes += _notes_on_frames(image)
    return tuple(notes)


def _notes_on_frames(image: Image.Image) -> list[str]:
    try:
        frames = getattr(image, "n_frames", 1)
    except (OSError, *PILLOW_ERRORS) as error:  # Pillow looks through the file for them; the first frame may be whole
        return [f"first frame used; what follows it in the file is damaged: {error}"]
    return [f"first of {frames} frames used"] if frames > 1 else []


def _no_image(data: bytes | bytearray) -> str:
    return f"not an image: it begins with {bytes(data[:12])!r}"


def _os_error(error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        stored = error.strerror or ""
        return stored if stored.startswith("image file not found") else "image file not found"
    return f"image file cannot be read: {error.strerror or error}"
