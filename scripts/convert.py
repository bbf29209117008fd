"""Convert a data set to another format, images included.

    python scripts/convert.py DIR found/coco --to coco
    python scripts/convert.py DIR found/yolo --to yolo --val 0.2
    python scripts/convert.py DIR found/vehicles --to coco --classes '{car: vehicle, truck: vehicle}'
    python scripts/convert.py train.json found/voc --to voc --image-dir images
    python scripts/convert.py DIR found/segments --to yolo --masks

SRC is a folder of any format (Pascal VOC, YOLO, COCO, CSV, `datasets`, LabelMe) or an annotation file; all its splits
are written, with `--masks` also the masks of objects. Whatever the new format cannot represent is reported. The exit
code is 0, or 2 if the source cannot be read.
"""

import sys
from pathlib import Path

from toolkit.base.errors import exit_on_bad_input
from toolkit.data.choices import FORMATS
from toolkit.tools.arguments import Program, add_classes_flag, add_data_flag

WRITTEN = ("coco", "voc", "yolo", "csv", "parquet", "labelme")


@exit_on_bad_input
def main(argv: list[str] | None = None) -> None:
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
    arguments = parser.parse_args(argv)
    from toolkit.tools.convert import convert  # takes seconds, so after parsing

    convert(arguments)


if __name__ == "__main__":
    sys.exit(main())
