"""Evaluate a run again, from its folder alone, and compare it with expected numbers.

    python scripts/evaluate.py runs/detr
    python scripts/evaluate.py runs/detr/checkpoints/latest --weights model --backend pycocotools
    python scripts/evaluate.py runs/detr --expect.bbox_AP 0.55 --tolerance 0.02        # exit code 1 when missed
    python scripts/evaluate.py runs/mine --split test.json --image-dir images          # other data, classes by name
    python scripts/evaluate.py runs/mine --path VOC2007 --split test --format voc      # of another format
    python scripts/evaluate.py runs/mine --split test-dev.json --save test-dev_results.json          # for a server
    python scripts/evaluate.py results.json                                            # the metrics of such a file
    python scripts/evaluate.py runs/mine --pictures found/mistakes    # of every image: what is right, wrong and missed
    python scripts/evaluate.py runs/fold_1 runs/fold_2 runs/fold_3                     # --data.val 1/3, 2/3, 3/3 as one
    python scripts/evaluate.py runs/detr/final/model.onnx                              # of an exported model
    python scripts/evaluate.py runs/mine --tile 640                                    # large pictures, in tiles
    python scripts/evaluate.py runs/causal --head.effect tde                           # a choice at inference; so are
    python scripts/evaluate.py runs/sgg --model.prior_adjustment 0.5                   # --model.nms_threshold and more

For a run folder, its best checkpoint is evaluated, with the weights (raw or averaged) that `eval.metric_for_best`
measures. Several processes can share the work: `torchrun --nproc_per_node 2 scripts/evaluate.py runs/detr`. VOC's mean
AP is printed in addition to COCO's metrics, and COCO's metrics of masks (segm_...) for a detector that predicts masks.
"""

import math
import sys
from collections.abc import Sequence
from pathlib import Path

from toolkit.base.errors import BadInput, exit_on_bad_input
from toolkit.base.imports import trust_files
from toolkit.base.text import shown
from toolkit.data.choices import CROWDS
from toolkit.data.tiling import MAX_OVERLAP
from toolkit.tools.arguments import (
    Program,
    add_data_flag,
    add_flags,
    finite_number,
    inference_flags,
    whole_number,
)


def expected_numbers(arguments: Sequence[str]) -> tuple[dict[str, float], list[str]]:
    """Return the `--expect.METRIC VALUE` pairs among arguments, by metric, and the other arguments.

    Raises BadInput for a value that is missing or is not a number.
    """
    expected = {}
    rest = []
    words = iter(arguments)
    for word in words:
        flag, equals, value = word.partition("=")
        if not flag.startswith("--expect."):
            rest.append(word)
            continue
        value = value if equals else next(words, None)
        try:
            smallest = float("" if value is None else value)
        except ValueError:
            smallest = math.nan
        if not math.isfinite(smallest):
            given = "nothing" if value is None else shown(value)
            raise BadInput(f"{flag} is {given}; expected a number, such as --expect.bbox_AP 0.55")
        expected[flag.removeprefix("--expect.")] = smallest
    return expected, rest


@exit_on_bad_input
def main(argv: list[str] | None = None) -> int:
    parser = Program(__doc__)
    run = "run folder, checkpoint, exported model, or predictions file; several: the folds of a cross-validation"
    parser.add_argument("run", type=Path, nargs="+", help=run)
    add_flags(parser, "--weights", "--split", "--image-dir", "--format", "--path", "--max-detections", "--trust")
    tile = "predict pictures in tiles of this side, and join them (default: as the run was trained; 0: whole pictures)"
    parser.add_argument("--tile", type=whole_number(0), metavar="PIXELS", help=tile)
    overlap = "fraction by which tiles overlap (default: as the run was trained, else 0.2)"
    parser.add_argument("--overlap", type=finite_number(0, MAX_OVERLAP), help=overlap)
    crowds = "what boxes marked as crowd regions are (default: as in the training): ignored, or objects like all others"
    add_data_flag(parser, "--crowds", choices=CROWDS, help=crowds)
    parser.add_argument("--save", metavar="FILE", help="write the predictions as COCO results, FILE.json")
    pictures = "write a picture of every image to this folder, with what is right, wrong and missed"
    parser.add_argument("--pictures", type=Path, metavar="DIR", help=pictures)
    parser.add_argument("--backend", choices=("toolkit", "pycocotools"), help="default: that of the run")
    missed = "how far a metric may be below --expect.METRIC"
    parser.add_argument("--tolerance", type=finite_number(0), default=0.0, help=missed)
    settings, rest = inference_flags(sys.argv[1:] if argv is None else argv)
    expected, rest = expected_numbers(rest)
    arguments = parser.parse_args(rest)
    arguments.settings = settings
    trust_files(arguments.trust)
    from toolkit.tools.evaluate import evaluate  # takes seconds, so after parsing

    return 0 if evaluate(arguments, expected) else 1


if __name__ == "__main__":
    sys.exit(main())
