"""Detect objects in images and videos with a trained detector; write the detections, and pictures with boxes.

    python scripts/predict.py runs/detr photo.jpg holiday/ --out found      # a run: its best weights
    python scripts/predict.py runs/detr/final 'holiday/**/*.jpg' --out found --score-threshold 0.5
    python scripts/predict.py runs/detr/checkpoints/latest photo.jpg --out found --weights model
    python scripts/predict.py exported/model.onnx film.mp4 --out found      # an exported file; a video
    python scripts/predict.py facebook/detr-resnet-50 holiday/ --out found  # a model of the hub
    python scripts/predict.py runs/detr map.png --out found --tile 640 --overlap 0.2
    ls photos/*.jpg | python scripts/predict.py runs/detr - --out found --format coco csv
    python scripts/predict.py runs/detr unlabelled/ --out next --uncertain 100   # the images to label next
    python scripts/predict.py runs/detr --camera 0 --max-frames 300 --out found
    python scripts/predict.py runs/yolov3 holiday/ --out found --model.nms_threshold 0.6
    python scripts/predict.py runs/sgdet holiday/ --out found --format json dot --all-scores
    python scripts/predict.py runs/causal holiday/ --out found --boxes boxes.json --head.effect tde

IMAGES are files, folders (searched recursively), quoted patterns, URLs and videos. `found/predictions.json` has

    {"model": ..., "score_threshold": 0.3, "categories": [{"id": 7, "name": "platelet"}, ...],
     "images": [{"id": 1, "file_name": "holiday/a.jpg", "width": 640, "height": 480,
                 "picture": "pictures/a.jpg",
                 "detections": [{"category_id": 7, "category": "platelet", "score": 0.93,
                                 "bbox": [x, y, width, height]}, ...]}, ...],
     "errors": [{"file_name": "holiday/b.jpg", "error": "image data truncated"}, ...]}

with the ids and names of the training data and boxes in pixels of the upright image, best first. A detector of masks
adds "segmentation" to each detection: COCO's run lengths, or with --polygons the polygons. A scene-graph detector
(sgdet) adds "relations": [{"subject": i, "object": j, "predicate": "on", "score": 0.61}, ...] for each image, the 100
best, where i and j are positions in its detections. Pictures show the best relations as arrows (--relations,
--relation-score) and say how many are not drawn. A model of predcls or sgcls needs the boxes of a COCO file (--boxes).
--format dot and networkx write each graph into `found/graphs/`. A video gives `found/videos/NAME.jsonl`, one line per
frame, and NAME.mp4 with the boxes.

Exit code 0: all done; 1: some files could not be read, they are listed and the others are done; 2: bad input.
"""

import argparse
import math
import sys
from pathlib import Path

from toolkit.base.errors import exit_on_bad_input
from toolkit.base.imports import trust_files
from toolkit.base.text import shown
from toolkit.data.tiling import MAX_OVERLAP
from toolkit.tools.arguments import Program, add_flags, finite_number, inference_flags, whole_number
from toolkit.tools.predict.choices import DEFAULT_THRESHOLD, OUTPUT_FORMATS


def score_or_auto(text: str) -> float | str:
    """Return the value of --score-threshold."""
    if text == "auto":
        return text
    try:
        score = float(text)
    except ValueError:
        score = math.nan
    if not 0 <= score <= 1:
        hint = f" (did you mean {score / 100:g}?)" if 2 <= score <= 100 else ""
        raise argparse.ArgumentTypeError(f"{shown(text)}: expected a number from 0 to 1, or auto{hint}")
    return score


@exit_on_bad_input
def main(argv: list[str] | None = None) -> int:
    parser = Program(__doc__)
    kinds = "run, checkpoint, final/ folder, .onnx, .pt2, .xml, .pth of Scene-Graph-Benchmark, or model of transformers"
    parser.add_argument("model", help=kinds)
    images = "files, folders, quoted patterns, URLs, videos; - reads a list"
    parser.add_argument("images", nargs="*", default=[], help=images)
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier prediction in that folder")
    parser.add_argument(
        "--format", nargs="+", choices=OUTPUT_FORMATS, default=["json"], help="files to write (default json)"
    )
    outlines = "write masks in predictions.json as polygons around their pixels, not as run lengths"
    parser.add_argument("--polygons", action="store_true", help=outlines)
    parser.add_argument("--boxes", type=Path, metavar="FILE", help="COCO file with the given boxes of a graph model")
    parser.add_argument("--all-scores", action="store_true", help="write the scores of all predicates of each pair")
    free = "keep the 100 best (pair, predicate) combinations, not one predicate per pair"
    parser.add_argument("--no-graph-constraint", action="store_true", help=free)
    most = "relations drawn in a picture, at most (default 20)"
    parser.add_argument("--relations", type=whole_number(0), default=20, help=most)
    least = "minimum score of a drawn relation (default 0.0); the files list the 100 best in any case"
    parser.add_argument("--relation-score", type=finite_number(0, 1), default=0.0, help=least)
    parser.add_argument("--image-ids", type=Path, help="COCO file to take image ids from (default: 1, 2, 3, ...)")
    add_flags(parser, "--weights", "--max-detections", "--trust")
    least = "minimum score (default 0.3); auto: thresholds of the report"
    parser.add_argument("--score-threshold", "--threshold", type=score_or_auto, default=DEFAULT_THRESHOLD, help=least)
    parser.add_argument("--classes", nargs="+", metavar="NAME", help="keep only these classes")
    tile = "predict large images in tiles of this longer side (default: as the run was trained; 0: whole images)"
    parser.add_argument("--tile", type=whole_number(0), metavar="PIXELS", help=tile)
    overlap = "fraction by which tiles overlap (default: as the run was trained, else 0.2)"
    parser.add_argument("--overlap", type=finite_number(0, MAX_OVERLAP), help=overlap)
    parser.add_argument("--flip", action="store_true", help="also predict the mirrored image, and merge (TTA)")
    most = "write only the NUMBER images most worth labelling next, in the order of uncertain.csv"
    parser.add_argument("--uncertain", type=whole_number(1), metavar="NUMBER", help=most)
    parser.add_argument("--camera", type=whole_number(0), metavar="NUMBER", help="number of a camera of this machine")
    parser.add_argument("--max-frames", type=whole_number(1), help="stop a video or camera after so many frames")
    parser.add_argument("--batch-size", type=whole_number(1), default=8, help="images per batch (default 8)")
    parser.add_argument("--no-pictures", action="store_true", help="write no pictures and no videos")
    parser.add_argument("--device", help="cpu, cuda:1, mps, … (default: the GPU, if any)")
    settings, rest = inference_flags(sys.argv[1:] if argv is None else argv)
    arguments = parser.parse_args(rest)
    arguments.settings = settings
    trust_files(arguments.trust)
    from toolkit.tools.predict.program import predict  # takes seconds, so after parsing

    return predict(arguments)


if __name__ == "__main__":
    sys.exit(main())
