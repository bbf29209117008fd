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
from toolkit.data.choices import CROWDS, FORMATS
from toolkit.tools.arguments import Program, add_classes_flag, add_data_flag, whole_number
from toolkit.tools.doctor.choices import TRAINING


@exit_on_bad_input
def main(argv: list[str] | None = None) -> int:
    parser = Program(__doc__)
    parser.add_argument("source", nargs="+", help="folder, annotation files, or names of splits, as --data.train")
    images = "folder, archive or URL that file names are relative to; may be repeated (default: looked for)"
    add_data_flag(parser, "--image-dir", help=images)
    add_data_flag(parser, "--format", choices=FORMATS, default="auto", help="format of the data; auto recognises it")
    add_data_flag(parser, "--name", help="hub name or folder of `datasets`, as in training")
    faulty = "as --data.on_error in training; with drop, faulty records count as warnings"
    add_data_flag(parser, "--on-error", choices=("raise", "drop"), default="raise", help=faulty)
    depths = "full decodes every image and compares them all; auto does so where no split has more than 20,000 images; "
    depths += "header reads sizes and ends of files; none opens no image"
    parser.add_argument("--check-images", choices=("auto", "full", "header", "none"), default="auto", help=depths)
    add_classes_flag(parser)
    add_data_flag(parser, "--white", type=int, help="value of 16-bit images that becomes white (default: 65535)")
    parser.add_argument("--masks", action="store_true", help="read and check the masks of objects too")
    crowds = "what boxes marked as crowd regions (iscrowd 1) are, as in training: ignored, or objects like all others"
    add_data_flag(parser, "--crowds", choices=CROWDS, default="ignore", help=crowds)
    side = "image size in pixels in training, SIDE or HEIGHT WIDTH (default: that of the settings file in the command)"
    add_data_flag(parser, "--image-size", type=whole_number(1), nargs="+", help=side)
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
