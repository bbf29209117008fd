"""Runs the batch of a report again, and says what breaks; `scripts/replay.py` parses the flags."""

from collections.abc import Mapping
from pathlib import Path

import torch

from toolkit.base.files import read_json_object
from toolkit.models import options_class
from toolkit.models.final import load_detector_weights
from toolkit.run.open_run import open_script
from toolkit.run.settings_file import load_config_dict, newest_config
from toolkit.tools.predict.open import rebuild_detector
from toolkit.tools.replay.diagnosis import describe_finding, replay
from toolkit.tools.replay.nan_report import load_named_state, load_report
from toolkit.tools.replay.replay_session import loop_of_script, weights_as_they_were, window_of_report


def run_again(folder: Path) -> bool:
    """Run the batch of a report of the NaN guard again, print what breaks, and return whether it is the same.

    folder: of one rank's report.
    """
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
    return finding["reproduced"]


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
