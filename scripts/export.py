"""Export a trained detector for programs without PyTorch, from pixels to boxes, and verify its predictions.

    python scripts/export.py runs/detr --out exported                               # ONNX and torch.export
    python scripts/export.py runs/detr --out exported --formats onnx fp16 openvino int8 --benchmark
    python scripts/export.py runs/yolov3 --out exported --model.nms_threshold 0.6   # settings of prediction, inside
    python scripts/export.py runs/detr/final --out exported --split val.json --image-dir images

`exported/model.onnx` (opset 18), `model.pt2` (torch.export), `model_fp16.onnx` (half precision), `model.xml` and
`model_int8.xml` (OpenVINO, which `pip install ".[openvino]"` installs) take images uint8 (B, 3, H, W),
RGB, and give boxes (B, K, 4) xyxy in pixels of these images, scores (B, K) and labels (B, K), best first; rows without
a detection have score 0 and label -1. Those of a detector with masks give masks (B, K, h, w) too, probabilities in the
box or over the whole image, as the metadata says. Normalisation, padding, decoding and suppression are part of the
file. Batches may have any number of images, and images any size that the model allows. Classes, the size that images
are resized to, and the threshold are in the metadata. scripts/predict.py takes these files like a run; a `.pt2` needs
`--trust`, because it can run any code.

Each file is then evaluated on the run's validation data (or `--split`), and its AP is compared with PyTorch's.
`--benchmark` measures milliseconds of an image in batches of 1 and 8, on one thread and two.
All detectors can be exported. For a scene graph, these files contain its detector alone. `exported/graph.onnx` also has
the relations, and its R@K is compared; it is written for EGTR, and in sgdet for PE-Net, REACT and REACT++ on a
one-stage detector. For others a message says why it is not written. Exit code 0: all files are written and as good as
PyTorch; 1: the AP or R@100 of a file differs by more than `--tolerance`, and the file is renamed to `*.wrong`; 2: bad
input.
"""

import sys
from pathlib import Path

from toolkit.base.errors import exit_on_bad_input
from toolkit.base.imports import trust_files
from toolkit.tools.arguments import (
    Program,
    add_data_flag,
    add_flags,
    finite_number,
    inference_flags,
    whole_number,
)
from toolkit.tools.export.request import EXPORTED_FILES, ExportRequest
from toolkit.tools.interrupts import interrupt_ends_at_once


def parser() -> Program:
    parser = Program(__doc__)
    parser.add_argument("model", help="run folder, checkpoint or final/ folder")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument(
        "--formats", nargs="+", choices=EXPORTED_FILES, default=list(ExportRequest.formats), help="default: onnx torch"
    )
    add_flags(parser, "--weights", "--trust")
    size = {"nargs": 2, "type": whole_number(1), "metavar": ("HEIGHT", "WIDTH")}
    parser.add_argument("--size", **size, help="resize images to this size")
    rows = "maximum number of detections per image (default 300, or as many as the run evaluates where that is more)"
    parser.add_argument("--top-k", type=whole_number(1), help=rows)
    score = "score to use detections from, in the metadata (default: what the report recommends, else 0.3)"
    parser.add_argument("--score-threshold", type=finite_number(0, 1), help=score)
    without = "write the sampling of deformable attention without GridSample: equal, and slower in ONNX Runtime"
    parser.add_argument("--no-grid-sample", dest="grid_sample", action="store_false", help=without)
    measured = "measure milliseconds of an image in batches of 1 and 8, on one thread and two"
    parser.add_argument("--benchmark", action="store_true", help=measured)
    parser.add_argument("--split", help="annotation file to compare AP on, instead of the run's validation data")
    images = "folder, archive or URL of its images; may be repeated"
    add_data_flag(parser, "--image-dir", help=images)
    add_data_flag(parser, "--format", default="coco", help="its format (default coco)")
    change = "maximum change of AP, R@100 (default %(default)s)"
    tolerance = finite_number(0)
    parser.add_argument("--tolerance", type=tolerance, default=ExportRequest.tolerance, help=change)
    drop = "maximum drop of AP in int8 (default %(default)s)"
    parser.add_argument("--int8-tolerance", type=tolerance, default=ExportRequest.int8_tolerance, help=drop)
    images = "calibration images for int8 (default %(default)s)"
    parser.add_argument("--calibration", type=whole_number(1), default=ExportRequest.calibration, help=images)
    return parser


@exit_on_bad_input
def main(argv: list[str] | None = None) -> int:
    settings, rest = inference_flags(sys.argv[1:] if argv is None else argv)
    arguments = parser().parse_args(rest)
    arguments.settings = settings
    trust_files(arguments.trust)
    from toolkit.tools.export.program import export  # takes seconds, so after parsing

    with interrupt_ends_at_once():
        return 0 if export(arguments) else 1


if __name__ == "__main__":
    sys.exit(main())
