"""Export a trained detector for programs without PyTorch, from pixels to boxes, and verify its predictions.

    python scripts/export.py runs/detr --out exported                               # ONNX and torch.export
    python scripts/export.py runs/detr --out exported --formats onnx fp16 openvino int8 --benchmark
    python scripts/export.py runs/yolov3 --out exported --model.nms_threshold 0.6   # settings of prediction, inside
    python scripts/export.py runs/detr/final --out exported --split val.json --image-dir images

`exported/model.onnx` (opset 18), `model.pt2` (torch.export), `model_fp16.onnx` (half precision), `model.xml` and
`model_int8.xml` (OpenVINO, which `pip install "detection-toolkit[openvino]"` installs) take images uint8 (B, 3, H, W),
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

import argparse
import json
import sys
from dataclasses import asdict, fields
from pathlib import Path

from toolkit.base.errors import BadInput, exit_on_bad_input
from toolkit.base.imports import trust_files
from toolkit.data.pipeline import processor_size, tiling_of_run
from toolkit.data.splits import open_split
from toolkit.data.windows import windows_of_table
from toolkit.models import options_class
from toolkit.run.open_run import run_folder_of
from toolkit.run.settings_file import load_config_dict
from toolkit.tools.arguments import Program, add_data_flag, finite_number, inference_flags, whole_number
from toolkit.tools.export import check_exportable
from toolkit.tools.export.judge import (
    EXPORTED_FILES,
    ExportRequest,
    graphs_as_table,
    results_as_table,
    write_and_check,
    write_relations,
)
from toolkit.tools.interrupts import interrupt_ends_at_once
from toolkit.tools.predict.open import OwnDetector, add_flags, open_own_detector, report_thresholds
from toolkit.tools.predict.predict_split import SplitOptions, split_arguments


def export(arguments: argparse.Namespace) -> bool:
    """Write and check all files, and print a table. Return whether all files are as good as PyTorch."""
    trained = opened(arguments)
    table = validation_table(arguments)
    out = arguments.out
    if arguments.score_threshold is None:
        recommended = report_thresholds(Path(arguments.model).expanduser()) or {}
        arguments.score_threshold = recommended.get("", ExportRequest.score_threshold)
    request = ExportRequest(**{field.name: getattr(arguments, field.name) for field in fields(ExportRequest)})
    lines, problems = write_and_check(trained, table, out, request)
    graphs = write_relations(trained, table, out, request, problems)
    for file, problem in problems.items():
        print(f"{out / file}: {problem}; it is now {file}.wrong", file=sys.stderr)
    content = {"source": trained.source, "files": [asdict(line) for line in lines], "graphs": graphs}
    (out / "export.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    print(results_as_table(lines))
    if graphs:
        print(f"\n{graphs_as_table(graphs)}")
    if table is None:
        print("no validation data is known: AP was not compared; give them with --split FILE --image-dir FOLDER")
    return not problems


def opened(arguments: argparse.Namespace) -> OwnDetector:
    """Open the detector to export. Raises BadInput for one that cannot be exported."""
    path = Path(arguments.model).expanduser()
    trained = open_own_detector(path, arguments.weights, arguments.settings)
    if trained is None and (path.parent / "config.yaml").is_file():  # the folder for transformers inside a run
        trained = open_own_detector(path.parent, settings=arguments.settings)
    if trained is None:
        raise BadInput(f"{arguments.model}: a model of transformers; give the run that it is of, or a checkpoint")
    check_exportable(trained.detector)
    size = arguments.size and dict(zip(("height", "width"), arguments.size, strict=True))
    return trained._replace(size=size) if size else trained


def validation_table(arguments: argparse.Namespace):
    """Open the data on which the exported files are evaluated; None if no data are known.

    For a run that was trained on tiles (`data.tile`) these are the tiles, which are what the files get.
    """
    try:
        folder = run_folder_of(Path(arguments.model).expanduser())
    except BadInput:
        folder = None
    config = None
    if folder is not None:
        config = load_config_dict(folder / "config.yaml", options_class, needed=("model", "data"))
    if arguments.split is not None:
        data = {} if config is None else config["data"]
        as_trained = {"classes": data.get("classes", {}), "white": data.get("white")}
        reading = {"image_dir": arguments.image_dir, "format": arguments.format, **as_trained}
        return open_split(arguments.split, say=print, **reading)
    if config is None:
        return None
    table = open_split(**split_arguments(config, SplitOptions()), say=print)
    data = config["data"]
    tiling = tiling_of_run(data, processor_size(data["image_size"], data["scales"], data["max_size"]))
    if tiling is None:
        return table
    windows = windows_of_table(table, tiling)
    print(f"the files are compared on tiles, and AP is that of tiles, not of pictures: {windows}")
    return windows


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
    with interrupt_ends_at_once():
        return 0 if export(arguments) else 1


if __name__ == "__main__":
    sys.exit(main())
