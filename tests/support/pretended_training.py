"""Trainings of candidates that end at once: a candidate finds the objects of some of the images of the validation data,
of more the better it is and the longer it trains."""

import json
from pathlib import Path
from types import SimpleNamespace

from report_data import ground_truth_as_predictions

from toolkit.data.formats import open_dataset
from toolkit.evaluation.predictions import PREDICTIONS, write_predictions


class PretendedRun:
    """In place of `WatchedRun`. The word behind the script is the share of the images, the first ones, of which a
    candidate finds the objects after a minute; below 0: of the last ones. "fail" fails.

    started: the settings of each start with the environment, by name of the candidate.
    """

    data = Path()
    started: dict[str, list] = {}

    def __init__(self, command, folder, output, environment):
        self.folder = Path(folder)
        given = dict(word.removeprefix("--").split("=", 1) for word in command if "=" in word)
        self.started.setdefault(self.folder.name, []).append((given, environment))
        self.skill = command[2]
        self.minutes = float(given["run.max_minutes"])
        self.process = SimpleNamespace(poll=self.poll)

    def poll(self) -> int:
        if self.skill != "fail":
            self._write()
        return 0

    def _write(self) -> None:
        table = open_dataset(str(self.data / "annotations" / "val.json"))
        found = round(float(self.skill) * self.minutes**0.5 * len(table))
        ids = table.image_ids()
        predictions = ground_truth_as_predictions(table)
        for image_id in (ids[found:] if found >= 0 else ids[:found]).tolist():
            predictions[image_id] = {key: value[:0] for key, value in predictions[image_id].items()}
        where = {"source": str(self.data / "annotations" / "val.json")}
        (self.folder / "checkpoints" / "step_000009").mkdir(parents=True, exist_ok=True)
        write_predictions(self.folder / "report" / PREDICTIONS, predictions, table, detector="x", data=where)
        latest = self.folder / "checkpoints" / "latest"
        latest.unlink(missing_ok=True)
        latest.symlink_to("step_000009")
        state = {"parts": {"plan": {"budget": {"max_minutes": self.minutes, "elapsed_s": 60 * self.minutes}}}}
        (latest / "state.json").write_text(json.dumps(state))
        model = {"architecture": "ssd", "backbone": "resnet18", "pretrained_backbone": False}
        (self.folder / "config.yaml").write_text(json.dumps({"model": model}))
        (self.folder / "status.json").write_text(json.dumps({"state": "done", "step": 9}))

    state = "failed"

    def stop(self) -> None:
        """Do nothing: it has ended."""

    def last_words(self) -> str:
        return "error: it cannot"
