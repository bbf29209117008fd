"""Computes YOLOv3 anchors for a data set.

    python -m toolkit.tools.anchors --annotations bccd/annotations/train.json --image-size 256
"""

from collections.abc import Sequence

import numpy as np

from toolkit.base.errors import BadInput, exit_on_bad_input
from toolkit.data.formats import open_dataset
from toolkit.data.table import DetectionTable
from toolkit.detectors.yolov3.options import DEFAULT_ANCHORS
from toolkit.detectors.yolov3.targets import kmeans_anchors, shape_iou
from toolkit.tools.arguments import Program, add_data_flag, whole_number


@exit_on_bad_input
def main(arguments: Sequence[str] | None = None) -> None:
    """Print anchors for a data set, as YAML for `--model.anchors`, and how well these and the default anchors fit."""
    command = Program(main.__doc__, prog="python -m toolkit.tools.anchors")
    command.add_argument(
        "--annotations",
        required=True,
        help="annotation file, folder or split, as --data.train",
    )
    add_data_flag(
        command,
        "--path",
        help="as --data.path; --annotations is then the name of a split",
    )
    images = "folder, archive or URL of the images, where the annotations do not say; may be repeated"
    add_data_flag(command, "--image-dir", help=images)
    add_data_flag(command, "--format", default="auto", help="as --data.format")
    add_data_flag(command, "--name", help="as --data.name")
    add_data_flag(
        command,
        "--on-error",
        choices=("raise", "drop"),
        default="raise",
        help="as --data.on_error",
    )
    add_data_flag(
        command,
        "--image-size",
        type=whole_number(1),
        nargs="+",
        default=[416],
        help="pixels: SIDE or HEIGHT WIDTH",
    )
    command.add_argument(
        "--per-level",
        type=whole_number(1),
        default=3,
        help="anchors of each of the three levels",
    )
    command.add_argument("--seed", type=whole_number(0), default=0)
    options = command.parse_args(arguments)
    reading = {key: getattr(options, key) for key in ("path", "image_dir", "format", "name", "on_error")}
    side = options.image_size[0]
    size_hw = tuple(options.image_size)
    if len(size_hw) > 2:
        raise BadInput(f"--image-size {' '.join(map(str, size_hw))}: expected SIDE or HEIGHT WIDTH in pixels")
    table = open_dataset(options.annotations, **reading)
    print(
        anchors_report(
            table,
            size_hw if len(size_hw) == 2 else (side, side),
            options.per_level,
            options.seed,
        )
    )


def anchors_report(table: DetectionTable, input_hw: tuple[int, int], per_level: int, seed: int) -> str:
    """Return YAML text with 3 x `per_level` anchors for a table, and a comment on the fit.

    Args:
        input_hw: height and width in pixels of the images that the detector gets.
        per_level: number of anchors of each of the three levels.
        seed: seed of k-means.

    Raises BadInput if the table has fewer boxes than anchors.
    """
    sizes = box_sizes(table, input_hw)
    if len(sizes) < 3 * per_level:
        raise BadInput(f"{table.name}: {len(sizes)} boxes with area are too few for {3 * per_level} anchors.")
    anchors, fit = kmeans_anchors(sizes, 3 * per_level, seed)
    default_fit = shape_iou(sizes, np.array(DEFAULT_ANCHORS, dtype=np.float64).reshape(-1, 2)).max(axis=1).mean()
    fits = f"mean IoU with the nearest anchor {fit:.3f}, default anchors {default_fit:.3f}"
    lines = [f"# {len(sizes)} boxes at {input_hw[0]} x {input_hw[1]} px: {fits}"]
    lines.append("anchors:  # [width, height] in pixels for strides 32, 16, 8")
    return "\n".join(lines + [f"  - {level}" for level in anchors.round(1).reshape(3, -1, 2)[::-1].tolist()])


def box_sizes(table: DetectionTable, input_hw: tuple[int, int]) -> np.ndarray:
    """Return the width and height (n, 2) of all boxes of a table, in pixels of images resized to `input_hw` without
    keeping their aspect ratio.

    Crowd regions and boxes without area are left out.
    """
    truth = table.boxes()
    truth = truth[~truth.iscrowd]
    scale = (np.array(input_hw) / table.sizes_hw()[truth.image_index])[:, ::-1]
    sizes = (truth.xyxy[:, 2:] - truth.xyxy[:, :2]) * scale
    return sizes[(sizes > 0).all(axis=1)]


if __name__ == "__main__":
    raise SystemExit(main())
