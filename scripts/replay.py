"""Run a batch again that the NaN guard has reported, and report what breaks.

    python scripts/replay.py runs/detr/nan/step_000123/rank0
    python scripts/replay.py runs/mine/nan/step_000123/rank0 --trust        # of a script or a detector of your own

The batch runs in the loop of the training script that environment.json of the run names.
Exit code 0: the same thing breaks in the same place; 1: it does not (a transient fault, or other hardware); 2: bad
input.
"""

import sys
from pathlib import Path

from toolkit.base.errors import exit_on_bad_input
from toolkit.base.imports import trust_files
from toolkit.tools.arguments import Program, add_flags


@exit_on_bad_input
def main(argv: list[str] | None = None) -> int:
    parser = Program(__doc__)
    parser.add_argument("folder", type=Path, help="folder of one rank's report, <run>/nan/step_*/rank*")
    add_flags(parser, "--trust")
    arguments = parser.parse_args(argv)
    trust_files(arguments.trust)
    from toolkit.tools.replay.program import run_again  # takes seconds, so after parsing

    return 0 if run_again(arguments.folder) else 1


if __name__ == "__main__":
    sys.exit(main())
