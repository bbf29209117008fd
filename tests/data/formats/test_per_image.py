"""The folder of annotations is one of the usual names, or the only one that has any; `dirty_sets/voc.txt` has more."""

import pytest
from small_data import voc_text, write_text

from toolkit.data.formats.per_image import annotation_folders
from toolkit.data.formats.voc import FORMAT
from toolkit.data.layout import Layout


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        (["Annotations"], {"all": "Annotations"}),
        (["boxes"], {"all": "boxes"}),
        (["boxes", "others"], {}),
        (["train", "valid/labels"], {"train": "train", "val": "valid/labels"}),
        (["Annotations/train"], {"train": "Annotations/train"}),
    ],
)
def test_annotations_are_found(tmp_path, places, expected):
    for place in places:
        write_text(tmp_path / place / "1.xml", voc_text("1.png"))
    found = annotation_folders(FORMAT, Layout(tmp_path), tmp_path)
    assert {split: str(folder.relative_to(tmp_path)) for split, folder in found.items()} == expected
