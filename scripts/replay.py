"""Run a batch again that the NaN guard has reported, and report what breaks.

    python scripts/replay.py runs/detr/nan/step_000123/rank0
    python scripts/replay.py runs/mine/nan/step_000123/rank0 --trust        # of a script or a detector of your own

The batch runs in the loop of the training script that environment.json of the run names.
Exit code 0: the same thing breaks in the same place; 1: it does not (a transient fault, or other hardware); 2: bad
input.
"""

import sys
from collections.abc import Mapping
from pathlib import Path

import torch

from toolkit.base.errors import exit_on_bad_input
from toolkit.base.files import read_json_object
from toolkit.base.imports import trust_files
from toolkit.models import options_class
from toolkit.models.final import load_detector_weights
from toolkit.run.open_run import open_script
from toolkit.run.settings_file import load_config_dict, newest_config
from toolkit.tools.arguments import Program
from toolkit.tools.predict.open import add_flags, rebuild_detector
from toolkit.tools.replay.diagnosis import describe_finding, replay
from toolkit.tools.replay.nan_report import load_named_state, load_report
from toolkit.tools.replay.replay_session import loop_of_script, weights_as_they_were, window_of_report


@exit_on_bad_input
def main(arguments: list[str] | None = None) -> int:
    parser = Program(__doc__)
    parser.add_argument("folder", type=Path, help="folder of one rank's report, <run>/nan/step_*/rank*")
    add_flags(parser, "--trust")
    options = parser.parse_args(arguments)
    trust_files(options.trust)
    folder = options.folder
    report, batches, state, extra = load_report(folder)
    run = folder.absolute().parents[2]
    config = load_config_dict(newest_config(run), options_class)
    detector = rebuild_detector(config, [category["name"] for category in report["categories"]])
    load_detector_weights(detector, state, folder)
    if report.get("class_weights"):
        detector.weigh_classes(report["class_weights"])
    detector.to(memory_format=torch.channels_last)  # as in training: the same sums
    print((folder / "report.txt").read_text(encoding="utf-8"))
    script, remark = open_script(read_json_object(run / "environment.json").get("script"))
    if remark:
        print(remark)
    if script is not None:
        again = loop_of_script(script, newest_config(run), report, batches, detector, extra)
    else:
        again = window_of_report(detector, weights_as_they_were(detector, report), report, batches)
    finding = replay(detector, report, batches, again, load_named_state(folder))
    print(f"run again: {describe_finding(finding)}")
    print(_verdict(finding))
    return 0 if finding["reproduced"] else 1


def _verdict(finding: Mapping) -> str:
    if finding["reproduced"]:
        return "reproduced"
    lacking = finding["lacking"]
    if lacking:
        names = ", ".join(lacking[:3]) + (f" and {len(lacking) - 3} more" if len(lacking) > 3 else "")
        return (
            f"not reproduced: this report does not hold {names}, because an older version of the toolkit wrote it; "
            "report.txt above says all that it knows"
        )
    return "not reproduced: something else happened this time"


if __name__ == "__main__":
    sys.exit(main())
