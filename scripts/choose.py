"""Choose a detector for your data: train several for a share of the minutes, stop the worse half, go on with the rest.

    python scripts/choose.py DIR --minutes 60
    python scripts/choose.py DIR --minutes 60 --metric APs --devices 0 1 --out runs/small_objects
    python scripts/choose.py DIR --minutes 30 --out runs/two --candidates configs/detr/bccd.yaml configs/ssd/bccd.yaml

Without --candidates, those are the settings files for own data of the four families of detectors: with a GPU and a
network the ones with trained weights, else the small ones. The answer is a page, OUT/index.html: which detector, why,
what is not decided yet, how fast and how large each is, and the command that trains the winner further. After a kill,
the same command goes on. Flags that are not listed below go to all trainings, as --data.workers=0. The minutes are
those of training on each device; evaluations and the page take a few more.

Exit code 0: done, 2: bad input, 85: interrupted; the same command goes on.
"""

import argparse
import os
import sys
from functools import partial
from pathlib import Path

from toolkit.base.errors import BadInput, exit_on_bad_input
from toolkit.base.signals import StopSignals
from toolkit.evaluation.shown_metrics import COCO_METRICS
from toolkit.tools.arguments import Program, add_reading_flags, finite_number

METRICS = [*COCO_METRICS, *(f"segm_{name}" for name in COCO_METRICS)]


def choose(options: argparse.Namespace, rest: list[str]) -> None:
    if options.no_gpu:
        os.environ["ACCELERATE_USE_CPU"] = "true"
    if options.offline:
        os.environ["HF_HUB_OFFLINE"] = "1"
    from toolkit.tools.doctor.training_command import Source, name_of_run  # takes seconds, so after parsing
    from toolkit.tools.sweeps.answer import write_answer
    from toolkit.tools.sweeps.candidates import find_candidates
    from toolkit.tools.sweeps.choice import open_choice, run_rounds
    from toolkit.tools.sweeps.locks import locked

    name = name_of_run([Source(source) for source in options.source], options.name)
    out = (options.out or Path("runs") / f"choice_{name}").expanduser().absolute()
    metric = options.metric or ("segm_AP" if options.masks else "AP")
    asked = {key: value for key, value in vars(options).items() if key not in ("out", "devices")}
    asked |= {"metric": metric, "devices": len(options.devices), "rest": rest}
    out.mkdir(parents=True, exist_ok=True)
    say = partial(print, flush=True)
    with locked(out / ".lock", wait=False) as is_free, StopSignals() as signals:
        if not is_free:
            raise BadInput(f"--out {out}: another choose.py is at work in it; wait for it, or give another --out")
        choice = open_choice(out, asked, partial(find_candidates, options, rest))
        run_rounds(choice, options.devices, signals, say)
        text, page = write_answer(choice)
        say(f"\n{text}\n\nwrote {page}")


@exit_on_bad_input
def main(argv: list[str] | None = None) -> None:
    parser = Program(__doc__, allow_abbrev=False)
    add_reading_flags(parser)
    minutes = "minutes of training in all, on each device"
    parser.add_argument("--minutes", type=finite_number(1e-3, 1e6), required=True, help=minutes)
    decides = "metric of the validation data that decides (default AP, or segm_AP with --masks)"
    parser.add_argument("--metric", choices=METRICS, metavar="METRIC", help=decides)
    files = "settings files of the candidates, whose comments name their script (default: those for own data)"
    parser.add_argument("--candidates", type=Path, nargs="+", help=files)
    parser.add_argument("--out", type=Path, help="folder of the page and the runs (default: runs/choice_ and the data)")
    devices = "values of CUDA_VISIBLE_DEVICES: one training at a time on each (default: one at a time)"
    parser.add_argument("--devices", nargs="+", default=[""], help=devices)
    parser.add_argument("--no-gpu", action="store_true", help="only candidates for a CPU")
    parser.add_argument("--offline", action="store_true", help="only candidates that need no network")
    choose(*parser.parse_known(argv))


if __name__ == "__main__":
    sys.exit(main())
