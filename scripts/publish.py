"""Write the model card of a run, and upload its final folder to the Hugging Face hub.

    python scripts/publish.py runs/detr                              # runs/detr/final/README.md, from the run's files
    python scripts/publish.py runs/detr --hub.push me/blood-cells    # and upload it; needs `hf auth login` or HF_TOKEN

Exit code 0: done, 2: bad input, or there is no token.
"""

import sys

from toolkit.base.errors import exit_on_bad_input
from toolkit.tools.arguments import Program
from toolkit.tools.publish.card import LICENCE


@exit_on_bad_input
def main(argv: list[str] | None = None) -> None:
    parser = Program(__doc__)
    parser.add_argument("run", help="run folder or its final/ folder")
    parser.add_argument("--hub.push", dest="name", metavar="USER/NAME", help="hub repository to upload to")
    parser.add_argument("--hub.private", dest="private", action="store_true", help="make the hub repository private")
    parser.add_argument("--licence", default=LICENCE, help=f"of the weights, as the hub spells it (default {LICENCE})")
    arguments = parser.parse_args(argv)
    from toolkit.tools.publish.push import push, write_run_card  # takes seconds, so after parsing

    if arguments.name is None:
        print(f"written: {write_run_card(arguments.run, arguments.licence)}")
    else:
        push(arguments.run, arguments.name, private=arguments.private, licence=arguments.licence)


if __name__ == "__main__":
    sys.exit(main())
