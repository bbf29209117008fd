"""Convert a data set to another format, images included.

    python scripts/convert.py DIR found/coco --to coco
    python scripts/convert.py DIR found/yolo --to yolo --val 0.2
    python scripts/convert.py DIR found/vehicles --to coco --classes '{car: vehicle, truck: vehicle}'
    python scripts/convert.py train.json found/voc --to voc --image-dir images
    python scripts/convert.py DIR found/segments --to yolo --masks

SRC is a folder of any format (Pascal VOC, YOLO, COCO, CSV, `datasets`) or an annotation file; all its splits are
written, with `--masks` also the masks of objects. Whatever the new format cannot represent is reported. The exit code
is 0, or 2 if the source cannot be read.
"""

import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from toolkit.base.errors import BadInput, exit_on_bad_input
from toolkit.data.classes import check_class_map, class_map_of
from toolkit.data.formats import FORMATS, open_dataset, recognise
from toolkit.data.splits import share_of
from toolkit.data.table import DetectionTable
from toolkit.tools.arguments import Program, add_classes_flag, add_data_flag
from toolkit.tools.doctor.near_duplicates import hold_out
from toolkit.tools.writers import unsupported_by, write_folder

WRITTEN = {"coco": "coco", "voc": "voc", "yolo": "yolo", "csv": "csv", "parquet": "hub"}


def open_source_splits(
    source: str, format: str, image_dir: list[str] | None, on_error: str, classes: Mapping, masks: bool = False
) -> dict[str, DetectionTable]:
    """Return tables by split: all splits of a folder, or an annotation file as the split train.

    on_error: "drop" leaves faulty records out, "raise" makes them an error. classes: as `data.classes`; empty: the
    classes stay as they are. masks: read the masks of objects too.
    """
    reading = {"format": format, "image_dir": image_dir, "on_error": on_error, "classes": classes, "masks": masks}
    if not Path(source).expanduser().is_dir():
        return {"train": open_dataset(source, **reading)}
    layout = recognise(source, format)
    print(layout)
    # if train exists, trainval is the union of train and val
    names = [name for name in layout.splits if name != "trainval" or "train" not in layout.splits]
    # a split may lack a class that another one has
    tables = {name: open_dataset(name, path=source, classes_must_exist=False, **reading) for name in names}
    listed = dict.fromkeys(name for table in tables.values() for name in table.as_stored().class_names)
    check_class_map(class_map_of(classes), list(listed), source)
    return {"train" if name == "all" else name: table for name, table in tables.items()}


@exit_on_bad_input
def main(arguments: list[str] | None = None) -> None:
    parser = Program(__doc__)
    parser.add_argument("source", metavar="SRC", help="folder of a data set, or an annotation file")
    parser.add_argument("target", metavar="DST", type=Path, help="new or empty folder")
    parser.add_argument("--to", required=True, choices=WRITTEN, help="format to write")
    add_data_flag(parser, "--format", choices=FORMATS, default="auto", help="format of SRC; auto recognises it")
    images = "folder, archive or URL of the images, if SRC does not say it; may be repeated"
    add_data_flag(parser, "--image-dir", help=images)
    add_data_flag(parser, "--val", help="fraction of the training images to hold out as split val: 0.2, 20%% or 1/5")
    add_data_flag(parser, "--on-error", choices=("raise", "drop"), default="raise", help="as in training")
    add_classes_flag(parser)
    parser.add_argument("--masks", action="store_true", help="read and write the masks of objects too")
    parser.add_argument("--link", action="store_true", help="hard-link images on the same disk instead of copying")
    options = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"  # read when `datasets` is imported
    if options.target.exists() and (not options.target.is_dir() or any(options.target.iterdir())):
        raise BadInput(f"{options.target}: not an empty folder; give a new one")
    tables = open_source_splits(
        options.source, options.format, options.image_dir, options.on_error, options.classes, options.masks
    )
    if options.val is not None and "val" in tables:
        raise BadInput(f"--val {options.val}: {options.source} has a split val already")
    if options.val is not None:
        share = share_of(options.val)
        if share is None:
            raise BadInput(f"--val {options.val}: expected a fraction between 0 and 1, or a fold such as 1/5")
        tables["train"], tables["val"] = hold_out(tables["train"], share)
    for split, table in tables.items():
        without_polygon = write_folder(table, options.target, split, WRITTEN[options.to], link=options.link)
        left_out = sum(problem.severity == "error" for problem in table.problems)
        lost = unsupported_by(table, WRITTEN[options.to])
        lost += [f"of objects whose mask has no pixel, boxes are written: {without_polygon}"] * bool(without_polygon)
        lost += [f"{left_out} faulty records were left out"] * bool(left_out)
        remarks = f" ({'; '.join(lost)})" if lost else ""
        print(f"{options.target}: {split}, {len(table)} images, {table.described_boxes()}{remarks}")


if __name__ == "__main__":
    sys.exit(main())
