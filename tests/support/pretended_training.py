"""Trainings of candidates that end at once: a candidate finds the objects of some of the images of the validation data,
of more the better it is and the longer it trains."""

import json
from pathlib import Path
from types import SimpleNamespace

from report_data import ground_truth_as_predictions

from toolkit.data.formats import open_dataset
from toolkit.evaluation.predictions import PREDICTIONS, write_predictions


def predictions_of_some(table, found: int) -> dict:
    """Predictions that find all objects of the first `found` images; below 0: of the last ones."""
    ids = table.image_ids()
    missed = ids[found:] if found >= 0 else ids[:found]
    predictions = ground_truth_as_predictions(table)
    for image_id in missed.tolist():
        columns = predictions[image_id]
        predictions[image_id] = {key: column[:0] for key, column in columns.items()}
    return predictions


class PretendedRun:
    """In place of `WatchedRun`. The word behind the script is the share of the images, the first ones, of which a
    candidate finds the objects after a minute; below 0: of the last ones. "fail" fails.

    started: the settings of each start with the environment, by name of the candidate.
    """

    data = Path()
    started: dict[str, list] = {}

    def __init__(self, command, folder, output, environment):
        self.folder = Path(folder)
        self.output = output
        given = {}
        for word in command:
            flag, _, value = word.partition("=")
            given[flag.removeprefix("--")] = value
        started = self.started.setdefault(self.folder.name, [])
        started.append((given, environment))
        self.skill = command[2]
        self.minutes = float(given["run.max_minutes"])
        self.process = SimpleNamespace(poll=self.poll)

    def poll(self) -> int:
        if self.skill != "fail":
            self._write_predictions()
            self._write_records()
        return 0

    def _write_predictions(self) -> None:
        annotations = str(self.data / "annotations" / "val.json")
        table = open_dataset(annotations)
        found = round(float(self.skill) * self.minutes**0.5 * len(table))
        write_predictions(
            self.folder / "report" / PREDICTIONS,
            predictions_of_some(table, found),
            table,
            detector="x",
            data={"source": annotations},
        )

    def _write_records(self) -> None:
        model = {"architecture": "ssd", "backbone": "resnet18", "pretrained_backbone": False}
        settings = {"model": model, "run": {"max_minutes": self.minutes}}
        (self.folder / "config.yaml").write_text(json.dumps(settings))
        (self.folder / "status.json").write_text('{"state": "done", "step": 9}')

    state = "failed"

    def stop(self) -> None:
        """Do nothing: it has ended."""

    def last_words(self) -> str:
        return "error: it cannot"
