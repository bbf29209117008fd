"""Report what is wrong with a model, and which threshold to deploy: one HTML file, and its numbers as JSON.

    python scripts/report.py runs/detr                                # writes runs/detr/report/index.html
    python scripts/report.py runs/detr --split test.json --image-dir images --out report_test
    python scripts/report.py results.json --split val.json            # COCO results of any other program
    python scripts/report.py runs/a runs/b results.json --out report_both    # side by side, with paired differences

For a run folder, the report is on the predictions that its best evaluation saved; with `--split`, `--weights` or a
checkpoint, the model predicts again. Exported models and models of transformers work too. docs/reports.md lists the
contents of the report.
"""

import sys
from pathlib import Path

from toolkit.base.errors import exit_on_bad_input
from toolkit.base.imports import trust_files
from toolkit.tools.arguments import Program, add_flags


@exit_on_bad_input
def main(argv: list[str] | None = None) -> None:
    parser = Program(__doc__)
    kinds = "run folder, checkpoint, exported model, or COCO results file"
    parser.add_argument("sources", nargs="+", metavar="RUN_OR_PREDICTIONS", help=kinds)
    add_flags(parser, "--split", "--image-dir", "--format", "--path", "--weights", "--trust")
    parser.add_argument("--out", type=Path, help="folder of the report")
    arguments = parser.parse_args(argv)
    trust_files(arguments.trust)
    from toolkit.tools.report.program import report  # takes seconds, so after parsing

    print(f"wrote {report(arguments)}")


if __name__ == "__main__":
    sys.exit(main())
