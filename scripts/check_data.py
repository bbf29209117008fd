"""Read a data set as training would, and report everything that is wrong with it.

    python scripts/check_data.py DIR
    python scripts/check_data.py train.json val.json --image-dir images --pictures found/pictures
    python scripts/check_data.py DIR --json found/report.json --fix found/cleaned
    python scripts/check_data.py train val --name HUB_NAME_OR_FOLDER
    python scripts/check_data.py val --format shapes
    python scripts/check_data.py DIR --classes '{car: vehicle, truck: vehicle}'
    python scripts/check_data.py DIR --masks --pictures found/pictures    # reads, checks and draws masks too
    python scripts/check_data.py DIR --script train_ssd       # ends with the command that trains this detector on it

A folder is read with all its splits, and these are compared: identical or near-duplicate images in two splits are
leakage. The exit code is 0 if nothing is wrong, 1 if there are warnings, and 2 if there are errors, with which training
would not start.
"""

import sys
from pathlib import Path

from toolkit.base.errors import exit_on_bad_input
from toolkit.tools.arguments import Program, add_reading_flags
from toolkit.tools.doctor.choices import TRAINING


@exit_on_bad_input
def main(argv: list[str] | None = None) -> int:
    parser = Program(__doc__)
    add_reading_flags(parser)
    parser.add_argument("--json", type=Path, help="write the findings to this file, for programs")
    pictures = "write pictures to this folder: samples of classes, positions, sizes, shapes"
    parser.add_argument("--pictures", type=Path, help=pictures)
    parser.add_argument("--anchors", action="store_true", help="also print anchors of YOLOv3 that fit")
    parser.add_argument("--augment", metavar="CONFIG", help="draw an augmented batch as this settings file makes it")
    which = "training script: of the settings file, where it does not name it, and of the command at the end "
    parser.add_argument("--script", choices=TRAINING, help=which + "(default: what suits this machine)")
    parser.add_argument("--fix", type=Path, metavar="OUT", help="new folder for a cleaned COCO copy and changes.txt")
    arguments = parser.parse_args(argv)
    from toolkit.tools.doctor.program import check_data  # takes seconds, so after parsing

    return check_data(arguments)


if __name__ == "__main__":
    sys.exit(main())
