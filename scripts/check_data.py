"""Reads a data set as training would and says all that is wrong with it.

    python scripts/check_data.py ANNOTATIONS.json --image-dir DIR
    python scripts/check_data.py train --name HUB_NAME_OR_FOLDER
    python scripts/check_data.py val --format shapes

Exit code 0 when training could start, 2 when it could not.
"""

import argparse
import logging
import sys
from collections import Counter

import numpy as np

from toolkit.data.formats import FORMATS, open_dataset
from toolkit.data.table import DetectionTable
from toolkit.errors import BadInput

HEADINGS = {"error": "ERRORS (records that cannot be used)", "warning": "WARNINGS (repaired)", "note": "NOTES"}


def report(table: DetectionTable) -> str:
    """Problems by severity, then what is left to train on."""
    lines = []
    for severity, heading in HEADINGS.items():
        found = [problem for problem in table.problems if problem.severity == severity]
        if found:
            lines += [f"{heading}: {len(found)}", *(f"  {str(problem).split(': ', 1)[1]}" for problem in found), ""]
    boxes, images, crowds = Counter(), Counter(), 0
    for index in range(len(table)):
        objects = table.row(index)["objects"]
        labels = objects["category"][objects["iscrowd"] == 0].tolist()
        boxes.update(labels)
        images.update(set(labels))
        crowds += int(objects["iscrowd"].sum())
    width = max(len("class"), *(len(name) for name in table.class_names))
    lines.append(f"{'class':{width}}  {'id':>8}  {'boxes':>8}  {'images':>8}")
    for label, category in enumerate(table.categories):
        lines.append(f"{category.name:{width}}  {category.id!s:>8}  {boxes[label]:>8}  {images[label]:>8}")
    background = int(np.sum(table.num_boxes() == 0))
    lines.append("")
    lines.append(f"{table.name}: {len(table)} usable images ({background} without objects), {boxes.total()} boxes, "
                 f"{crowds} crowd regions, {len(table.categories)} classes")
    if table.predicates:
        lines.append(f"relations: {', '.join(table.predicates)}")
    if table.attributes:
        lines.append(f"attributes: {', '.join(table.attributes)}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="annotation file or split, as --data.train in training")
    parser.add_argument("--image-dir", help="folder that file names are relative to (default: looked for)")
    parser.add_argument("--format", choices=FORMATS, default="auto")
    parser.add_argument("--name", help="as --data.name in training")
    parser.add_argument("--on-error", choices=("raise", "drop"), default="raise", help="as --data.on_error in training")
    parser.add_argument("--check-images", choices=("auto", "full", "header", "none"), default="auto",
                        help="full decodes every image; auto does so up to 20,000 images")
    options = parser.parse_args(arguments)
    logging.disable(logging.WARNING)  # its summary is in the report
    try:
        table = open_dataset(
            options.source,
            image_dir=options.image_dir,
            format=options.format,
            name=options.name,
            on_error="drop",
            check_images={"auto": True, "none": False}.get(options.check_images, options.check_images),
        )
    except BadInput as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(report(table))
    unusable = any(problem.severity == "error" for problem in table.problems)
    return BadInput.exit_code if unusable and options.on_error == "raise" else 0


if __name__ == "__main__":
    sys.exit(main())
