"""Chooses among detectors by successive halving (Jamieson & Talwalkar 2016): all train for a share of the minutes, the
worse half stops, the others go on.

The state on disk is the run folders of the candidates, and `choice.json` with what was asked for and the rounds that
are over. What comes next follows from these alone, so a kill changes nothing.

**Learning rates.** Each round is a training of its own length: its schedule ends with the round, and the next round is
an extension with a new schedule (`--run.resume_schedule new`), as of any run that has ended. So a round judges weights
that are as good as its minutes make them, as they would be deployed. In the middle of one schedule for all minutes,
detectors with averaged weights or a fast decay would look better than they are, and the rounds would say nothing about
what more minutes bring. A training that is interrupted inside a round keeps its schedule, and resumes bit for bit.
"""

import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import SimpleQueue

from toolkit.base.errors import BadInput, Preempted
from toolkit.base.files import read_json, shown_path, write_json_atomic
from toolkit.base.signals import StopSignals
from toolkit.evaluation.predictions import PREDICTIONS
from toolkit.run.settings_file import newest_config, read_settings
from toolkit.run.status import read_status
from toolkit.tools.predict.predict_split import SplitOptions, open_predictions_file
from toolkit.tools.report.comparison import MetricDifference, paired_difference
from toolkit.tools.report.judgement import Judgement
from toolkit.tools.report.page import with_interval
from toolkit.tools.report.program import judged_of
from toolkit.tools.sweeps.locks import wait_until_free
from toolkit.tools.watch import POLL_S, WatchedRun

CHOICE_FILE = "choice.json"
# In a round, a training is evaluated where its minutes end, and nothing else ends it.
OF_A_ROUND = "--run.eval_every=0 --eval.early_stopping_patience=null --eval.test_split=null"
# Share of the best's metric by which another seed alone may put a candidate behind: the standard deviations of short
# trainings in docs/results.md, Starting weights, are up to a quarter of their AP.
OF_SEEDS = 1 / 3


@dataclass
class Choice:
    """A choice among candidates, as its folder holds it.

    Attributes:
        asked: what the command asked for, by name; the same command goes on. `metric` decides, see `Judgement.numbers`;
            `minutes` are those of training in all, on each device; `devices` is the number of trainings at a time.
        candidates: the words of the command that trains each candidate, from its script on, by name; the order decides
            between equal numbers.
        rounds: the rounds that are over. Of each: `minutes` that a candidate has trained since its start, `values` of
            the metric by name, best first, and the names that go on, `stays`.
    """

    folder: Path
    asked: dict
    candidates: dict[str, list[str]]
    rounds: list[dict] = field(default_factory=list)

    @property
    def metric(self) -> str:
        return self.asked["metric"]

    @property
    def num_rounds(self) -> int:
        """The number of rounds: as many as leave one of the candidates, and at least two, which show a slope."""
        return max(2, math.ceil(math.log2(len(self.candidates))))

    @property
    def live(self) -> list[str]:
        """The names of the candidates of the present round."""
        return self.rounds[-1]["stays"] if self.rounds else list(self.candidates)

    @property
    def failed(self) -> list[str]:
        """The names of the candidates that were to train in a round that is over, and did not."""
        expected = [list(self.candidates), *(of_round["stays"] for of_round in self.rounds)]
        names = []
        for live, of_round in zip(expected, self.rounds, strict=False):
            names += [name for name in live if name not in of_round["values"]]
        return names

    @property
    def minutes_of_each(self) -> float:
        """Minutes that each candidate has trained at the end of the present round, since its start."""
        before = self.rounds[-1]["minutes"] if self.rounds else 0.0
        one_after_another = math.ceil(len(self.live) / self.asked["devices"])
        return before + self.asked["minutes"] / self.num_rounds / one_after_another

    def save(self) -> None:
        """Write `choice.json`."""
        content = asdict(self)
        del content["folder"]
        write_json_atomic(self.folder / CHOICE_FILE, content)


def open_choice(folder: Path, asked: Mapping, find: Callable[[], dict[str, list[str]]]) -> Choice:
    """Open the choice in a folder, or begin it with the candidates that `find` returns. asked: see `Choice`.

    Raises:
        BadInput: the folder holds a choice that something else was asked for, or is damaged; or see `find`.
    """
    path = folder / CHOICE_FILE
    asked = json.loads(json.dumps(asked, default=str))
    if not path.exists():
        choice = Choice(folder, asked, find())
        folder.mkdir(parents=True, exist_ok=True)
        choice.save()
        return choice
    try:
        choice = Choice(folder, **read_json(path))
    except TypeError as error:
        raise BadInput(f"{path}: not as this program wrote it ({error}); give another --out") from error
    apart = [key for key in asked if asked[key] != choice.asked.get(key)]
    if apart:
        before = ", ".join(f"{key} {choice.asked.get(key)}" for key in apart)
        raise BadInput(f"{folder}: holds a choice that was begun with {before}; give that again, or another --out")
    return choice


def run_rounds(choice: Choice, devices: Sequence[str], signals: StopSignals, say: Callable[[str], None]) -> None:
    """Train the rounds that are not over, with a line for each candidate.

    Args:
        devices: values of CUDA_VISIBLE_DEVICES, one for each training at a time; "": the variable is left as it is.
        say: called with each line.

    Raises:
        Preempted: a signal was received; all trainings have saved.
        BadInput: no candidate is left, or none finds anything.
    """
    while len(choice.rounds) < choice.num_rounds:
        number = f"round {len(choice.rounds) + 1} of {choice.num_rounds}"
        say(f"{number}: {', '.join(choice.live)}, to {choice.minutes_of_each:g} minutes of training each")
        judged = _train_round(choice, devices, signals, say)
        if not judged:
            raise BadInput(f"no candidate is left: all have failed; see {choice.folder / 'logs'}")
        if not any(judgement.numbers[choice.metric] for judgement in judged):
            raise BadInput(
                f"after {choice.minutes_of_each:g} minutes each, no candidate has found anything ({choice.metric} 0):"
                f" give more than --minutes {choice.asked['minutes']:g}, and another --out"
            )
        _end_round(choice, judged, say)


def _end_round(choice: Choice, judged: Sequence[Judgement], say: Callable[[str], None]) -> None:
    """Decide who goes on after the present round, and record it."""
    ranked = sorted(judged, key=lambda judgement: -judgement.numbers[choice.metric])
    is_last = len(choice.rounds) + 1 == choice.num_rounds
    worse = {} if is_last else stopping(ranked, choice.metric)
    for name, difference in worse.items():
        say(f"{name} stops. Against {ranked[0].name}: {difference.in_words()}")
    of_round = {
        "minutes": choice.minutes_of_each,
        "values": {judgement.name: judgement.numbers[choice.metric] for judgement in ranked},
        "stays": [judgement.name for judgement in ranked if judgement.name not in worse],
    }
    choice.rounds.append(of_round)
    choice.save()


def stopping(ranked: Sequence[Judgement], metric: str) -> dict[str, MetricDifference]:
    """Return who stops after a round, with the difference from the best: the worse half, except those whose difference
    may be chance: of the images, by a paired bootstrap over them, or of the seed, see `may_be_of_seed`.

    ranked: the candidates, best first.
    """
    worse = {}
    best = ranked[0].numbers[metric]
    for judgement in ranked[math.ceil(len(ranked) / 2) :]:
        difference = paired_difference(ranked[0], judgement, metric)
        may_be_chance = difference is None or difference.chance or may_be_of_seed(judgement.numbers[metric], best)
        if not may_be_chance:
            worse[judgement.name] = difference
    return worse


def may_be_of_seed(value: float, best: float) -> bool:
    """Return whether another seed alone may have put a candidate with `value` of the metric behind the best one."""
    return value > (1 - OF_SEEDS) * best


def _train_round(
    choice: Choice, devices: Sequence[str], signals: StopSignals, say: Callable[[str], None]
) -> list[Judgement]:
    """Train all candidates of the present round to its end, and return the statistics of those that have not failed."""
    free = SimpleQueue()
    for device in devices:
        free.put(device)

    def train(name: str) -> Judgement | None:
        device = free.get()
        try:
            return _train(choice, name, device, signals, say)
        finally:
            free.put(device)

    # A training ends with the thread that started it, see `WatchedRun`; those of the pool live until all have ended.
    with ThreadPoolExecutor(len(devices)) as pool:
        judged = list(pool.map(train, choice.live))
    if signals.received:
        raise Preempted(f"{signals.name}: the trainings have saved; the same command goes on")
    return [judgement for judgement in judged if judgement is not None]


def _train(
    choice: Choice, name: str, device: str, signals: StopSignals, say: Callable[[str], None]
) -> Judgement | None:
    """Train a candidate to the end of the present round, and return its statistics; None if it fails, or if a signal
    arrives."""
    folder = choice.folder / name
    output = choice.folder / "logs" / f"{name}.txt"
    if not is_through(choice, name):
        wait_until_free(folder, signals)
        if signals.received:
            return None
        say(f"{name} trains; its console is {shown_path(output)}")
        flags = [*OF_A_ROUND.split(), *flags_of(choice, name, choice.minutes_of_each)]
        command = [sys.executable, *choice.candidates[name], *flags]
        run = WatchedRun(command, folder, output, {"CUDA_VISIBLE_DEVICES": device} if device else {})
        try:
            while run.process.poll() is None and not signals.received:
                time.sleep(POLL_S)
        finally:
            run.stop()  # it saves
        if signals.received:
            return None
        if run.state == "preempted":
            raise Preempted(f"{name} was stopped, and has saved; the same command goes on")
        if not is_through(choice, name):
            say(f"{name} has failed and is left out:\n{run.last_words()}")
            return None
    try:
        judgement = judgement_of(choice, name)
    except BadInput as error:
        say(f"{name} is left out: {error}")
        return None
    value = with_interval(judgement.numbers[choice.metric], judgement.intervals[choice.metric])
    say(f"{name}: {choice.metric} {value} at step {read_status(folder).get('step')}")
    return judgement


def flags_of(choice: Choice, name: str, minutes: float) -> list[str]:
    """Return the flags that train a candidate on, until it has trained for `minutes` since its start."""
    settings = {
        "run.output_dir": shown_path(choice.folder),
        "run.name": name,
        "run.resume": "latest",
        "run.resume_schedule": "new",
        "run.max_minutes": minutes,
        "run.epochs": 1_000_000,  # the minutes alone limit the length
        "run.max_steps": "null",
    }
    return [f"--{key}={value}" for key, value in settings.items()]


def is_through(choice: Choice, name: str) -> bool:
    """Return whether a candidate has trained to the end of the present round."""
    folder = choice.folder / name
    if read_status(folder).get("state") != "done":
        return False
    return read_settings(newest_config(folder))["run"]["max_minutes"] == choice.minutes_of_each


def judgement_of(choice: Choice, name: str) -> Judgement:
    """Return the statistics of the best weights of a candidate so far, from the predictions that its training kept.

    Raises BadInput if there are none, or the metric is undefined.
    """
    predictions = choice.folder / name / "report" / PREDICTIONS
    predicted = open_predictions_file(predictions, SplitOptions(), say=lambda text: None)
    judgement = judged_of(name, predicted)[1]
    if judgement.numbers.get(choice.metric) is None:
        raise BadInput(f"{choice.metric} is undefined on {predicted.table.name}; choose by another --metric")
    return judgement
