"""Other data on another machine are told alike on every rank, with what differs."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from processes import run_on_ranks

from toolkit.base.distributed import world
from toolkit.base.errors import BadInput

REMOVED = "removed"
REVERSED = "reversed"


class Change(NamedTuple):
    """A change of the document on all ranks but the first: its place and new value, and what is said of it."""

    place: tuple
    value: Any
    words: str


BOXES = "other boxes or labels in 1 of the images"
REST = "other file names, sizes, areas, masks, attributes or relations in 1 of the images"
CHANGES = [
    Change(("info",), {}, ""),
    Change(("images", 0, "file_name"), "part 2/0.jpg", ""),  # another folder
    Change(("categories",), REVERSED, ""),
    Change(("images", 3), REMOVED, "3 images, not 4"),
    Change(("annotations", 5), REMOVED, f"5 boxes, not 6; {BOXES}, such as street/2.jpg (id 5)"),
    Change(("annotations", 0, "bbox"), [5.01, 5, 20, 30], f"{BOXES}, such as street/0.jpg (id 3)"),
    Change(("annotations", 0, "category_id"), 2, BOXES),
    Change(("annotations", 0, "iscrowd"), 1, BOXES),
    Change(("annotations", 0, "segmentation"), [[5, 5, 25, 5, 25, 35]], REST),
    Change(("annotations", 0, "area"), 77, REST),
    Change(("categories", 1, "name"), "train", "class 1 is train, not tram"),
    Change(("categories", 2), {"id": 9, "name": "van"}, "class 2, van, is one more"),
    Change(("images", 3, "height"), 70, f"{REST}, such as street/3.jpg"),
    Change(("images",), REVERSED, "images with other ids or in another order"),
    Change(("rel_annotations", 0, "predicate_id"), 8, REST),
    Change(("rel_categories", 0, "name"), "above", "predicate 0 is above, not behind"),
]


def document_of_four() -> dict:
    images = [
        {
            "id": 3 + i,
            "file_name": f"street/{i}.jpg",
            "width": 90,
            "height": 60 + i,
        }
        for i in range(4)
    ]
    annotations = []
    for i in range(6):
        annotation = {
            "id": i,
            "image_id": 3 + i // 2,
            "category_id": 1 + i % 2,
            "bbox": [5, 5, 20, 30],
        }
        annotations.append(annotation | {"segmentation": [[5, 5, 25, 5, 25, 35, 5, 35]]})
    return {
        "images": images,
        "annotations": annotations,
        "categories": [{"id": 1, "name": "bus"}, {"id": 2, "name": "tram"}],
        "rel_categories": [{"id": 7, "name": "behind"}, {"id": 8, "name": "beside"}],
        "rel_annotations": [{"image_id": 3, "subject_id": 0, "object_id": 1, "predicate_id": 7}],
    }


def apply(change: Change, document: dict) -> None:
    *places, last = change.place
    entry = document
    for place in places:
        entry = entry[place]
    if change.value == REMOVED:
        del entry[last]
    elif change.value == REVERSED:
        entry[last].reverse()
    elif isinstance(entry, list):
        entry.insert(last, change.value)
    else:
        entry[last] = change.value


def told_of_other_data(folder: Path) -> list[list[str]]:
    """Return what this rank is told of each change."""
    from toolkit.data.formats import open_dataset
    from toolkit.data.same_on_ranks import check_same_on_ranks

    rank, _ = world()
    told = []
    for number, change in enumerate(CHANGES):
        document = document_of_four()
        if rank:
            apply(change, document)
        file = folder / f"machine {rank}" / str(number) / "train.json"
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps(document))
        reading = {"check_images": False, "masks": True, "cache_dir": folder / f"cache {rank}"}
        table = open_dataset(file, image_dir=file.parent, **reading)
        told.append([])
        try:
            check_same_on_ranks({"training data": table, "validation data": table.head(2)})
        except BadInput as error:
            told[-1] = error.problems
    return told


def test_other_data_are_told_alike_on_every_rank_with_what_differs(tmp_path):
    first, *others = run_on_ranks(told_of_other_data, 3, tmp_path)
    assert others == [first, first]
    for change, problems in zip(CHANGES, first, strict=True):
        assert bool(problems) == bool(change.words), change
        if change.words:
            assert "training data: rank 1, 2 on the machine " in problems[0]
            assert change.words in problems[0]
