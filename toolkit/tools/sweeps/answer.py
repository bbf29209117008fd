"""The answer of a choice: which detector, why, what is not decided, and the command that trains it further; on a page.

The page is the comparison of runs (`toolkit.tools.report`), with the answer at its head.
"""

import math
import shlex
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

import numpy as np
import timm

from toolkit.base.distributed import default_device
from toolkit.base.errors import BadInput
from toolkit.base.files import shown_path
from toolkit.run.metrics_log import read_metrics
from toolkit.run.open_run import may_be_of_hub
from toolkit.run.settings_file import newest_config, read_settings
from toolkit.run.status import read_status
from toolkit.tools.export.judge import latency, write_and_check
from toolkit.tools.export.request import EXPORTED_FILES, ExportRequest
from toolkit.tools.predict.open import open_own_detector, open_predictor
from toolkit.tools.report.charts import ChartLine, LineChart
from toolkit.tools.report.comparison import paired_difference
from toolkit.tools.report.judgement import Judgement
from toolkit.tools.report.page import charts, number, paragraph, table, with_interval
from toolkit.tools.report.write import write_comparison
from toolkit.tools.sweeps.candidates import PRIOR
from toolkit.tools.sweeps.choice import Choice, flags_of, judgement_of, may_be_of_seed

IMAGES_OF_EXPORT = 4  # that an exported file is compared on
WORTH = 0.01  # of the metric, that a doubling of the minutes must bring
MAX_DOUBLINGS = 4


def write_answer(choice: Choice) -> tuple[str, Path]:
    """Write the page on a choice whose rounds are over; return the answer as text, and the page."""
    best_first = dict.fromkeys(name for of_round in choice.rounds[::-1] for name in of_round["values"])
    judged = [judgement_of(choice, name) for name in best_first if name not in choice.failed]
    measured = {judgement.name: measure(choice.folder / judgement.name, judgement.table) for judgement in judged}
    sentences = answer(choice, judged)
    more, command = go_on(choice, judged[0].name)
    shown = "".join(map(paragraph, [*sentences, more])) + f"<pre>{escape(command)}</pre>"
    head = [
        ("answer", "Answer", f"<div class=advice>{shown}</div>"),
        ("candidates", "Candidates", _candidates(choice, judged, measured)),
    ]
    page = write_comparison(choice.folder, judged, f"Which detector? {judged[0].name}", head)
    return "\n".join([*sentences, more, command]), page


def answer(choice: Choice, judged: Sequence[Judgement]) -> list[str]:
    """Return sentences on the winner, the first of `judged`: its metric, whom it beats, and who may be as good."""
    winner = judged[0]
    last = choice.rounds[-1]
    value = with_interval(winner.numbers[choice.metric], winner.intervals[choice.metric])
    sentences = [f"{winner.name}: {choice.metric} {value} after {last['minutes']:g} minutes of training."]
    for other in judged[1:]:
        difference = paired_difference(other, winner, choice.metric)
        if other.name not in last["values"] or difference is None:
            continue
        open_end = ""
        if expected(choice, other.name) > expected(choice, winner.name):
            open_end = ", but its curve is steeper, so more minutes might change it"
        elif difference.chance:
            open_end = ", so this is not decided yet"
        elif may_be_of_seed(last["values"][other.name], last["values"][winner.name]):
            open_end = "; another seed might change it"
        sentences.append(f"Against {other.name}, in the same minutes: {difference.in_words()}{open_end}.")
    stopped = [judgement.name for judgement in judged if judgement.name not in last["values"]]
    if stopped:
        why = "worse in an earlier round, which chance does not explain"
        sentences.append(f"Stopped, as they were {why}: {', '.join(stopped)}.")
    if choice.failed:
        sentences.append(f"Failed, so nothing is known of them: {', '.join(choice.failed)}.")
    return sentences


def go_on(choice: Choice, name: str) -> tuple[str, str]:
    """Return a sentence on how long the winner is worth training, by the slope of its curve, and the command for it."""
    gain = gain_of_doubling(choice, name)
    last = f"Between the last two rounds, a doubling of its minutes brought {gain:+.3f} {choice.metric}."
    times = doublings_worth(gain)
    if not times:
        words = ["python", "scripts/predict.py", shown_path(choice.folder / name), "photo.jpg", "--out", "found"]
        return f"{last} More minutes are hardly worth it; it predicts with:", " ".join(words)
    minutes = math.ceil(choice.rounds[-1]["minutes"] * 2**times)
    worth = f"If each further one brings half of the one before, {minutes} minutes in all are worth it:"
    command = ["accelerate", "launch", *choice.candidates[name], *flags_of(choice, name, minutes)]
    return f"{last} {worth}", shlex.join(command)


def gain_of_doubling(choice: Choice, name: str) -> float:
    """Return what a doubling of its minutes brought a candidate of the last two rounds, in the metric."""
    (earlier, before), (later, after) = ((each["minutes"], each["values"][name]) for each in choice.rounds[-2:])
    return (after - before) / math.log2(later / earlier)


def expected(choice: Choice, name: str) -> float:
    """Return the metric that a candidate of the last round reaches in the end if each further doubling of its minutes
    brings half of the one before."""
    return choice.rounds[-1]["values"][name] + gain_of_doubling(choice, name)


def doublings_worth(gain: float) -> int:
    """Return how often the minutes are worth doubling if the last doubling brought `gain`, and each further one brings
    half of the one before."""
    if gain < WORTH:
        return 0
    return min(MAX_DOUBLINGS, math.floor(math.log2(gain / WORTH)))


def measure(folder: Path, table) -> dict:
    """Measure a trained candidate on this machine.

    Returns:
        images/s, one at a time, from pixels to boxes, as "PyTorch" and, if it can be exported, "ONNX" (on the CPU),
        else the reason as "obstacle"; "MB" of its weights; "training_MB", the peak memory of its training.
    """
    few = table.select(np.arange(min(len(table), IMAGES_OF_EXPORT)))
    found = {"PyTorch": 1000 / latency(open_predictor(folder, device=default_device()), few)}
    exported = folder / "exported"
    request = ExportRequest(formats=("onnx",))
    try:
        _, problems = write_and_check(open_own_detector(folder), few, exported, request, say=lambda text: None)
        if problems:
            raise BadInput("; ".join(problems.values()))
        found["ONNX"] = 1000 / latency(open_predictor(exported / EXPORTED_FILES["onnx"]), few)
    except BadInput as error:
        found["obstacle"] = str(error)
    found["MB"] = sum(path.stat().st_size for path in (folder / "final").glob("*.safetensors")) / 1e6
    rows = read_metrics(folder / "metrics.jsonl")
    peaks = [value for row in rows for key, value in row.items() if key.endswith("/peak_mb")]
    found["training_MB"] = max(peaks, default=None)
    return found


def licence_of(model: Mapping) -> str:
    """Return the licence of the weights that a training began with, or the page that says it. model: its settings."""
    backbone = model.get("pretrained_backbone")
    name = model.get("pretrained") or (backbone if isinstance(backbone, str) else None)
    if name is not None:
        return f"see huggingface.co/{name}" if may_be_of_hub(str(name)) else f"of the publisher of {Path(name).name}"
    if not backbone:
        return "yours (random weights)"
    about = timm.get_pretrained_cfg(model["backbone"])
    return (about and about.license) or f"see huggingface.co/timm/{model['backbone']}"


def _candidates(choice: Choice, judged: Sequence[Judgement], measured: Mapping[str, Mapping]) -> str:
    """Return HTML with a table of the candidates, and charts of the metric against minutes and against speed."""
    rows = []
    of_minutes = []
    of_speed = []
    for i, judgement in enumerate(judged):
        name = judgement.name
        of_it = measured[name]
        value = judgement.numbers[choice.metric]
        rounds = [of_round for of_round in choice.rounds if name in of_round["values"]]
        minutes = [of_round["minutes"] for of_round in rounds]
        of_minutes.append(ChartLine(name, minutes, [of_round["values"][name] for of_round in rounds], i, dots=True))
        of_speed.append(ChartLine(name, [of_it["PyTorch"]], [value], i, dots=True))
        run = choice.folder / name
        rows.append(
            (
                name,
                with_interval(value, judgement.intervals[choice.metric]),
                _worst_class(judgement),
                f"{minutes[-1]:g}, {read_status(run).get('step', 0):,}",
                *(number(of_it.get(key), 1) for key in ("PyTorch", "ONNX")),
                ", ".join(number(of_it.get(key), 0) for key in ("MB", "training_MB")),
                licence_of(read_settings(newest_config(run))["model"]),
            )
        )
    head = ["", choice.metric, "worst class", "minutes, steps", "images/s, PyTorch", "ONNX", "MB", "licence"]
    notes = [f"{name} has no ONNX file: {of_it['obstacle']}" for name, of_it in measured.items() if "obstacle" in of_it]
    device = default_device().type
    notes += [
        f"images/s: one image at a time, from pixels to boxes, on this machine ({device}; ONNX on its CPU). "
        "MB: the file of the weights, and the peak of its training. Licence: of the weights that training began with.",
        "After a round, the worse half stops, except those whose difference from the best may be chance: that of the "
        "images, or that of the seed, which may take a third from a short training. Equal numbers are decided by the "
        f"order of the candidates: what was better on public data sets first ({PRIOR}). The validation images have "
        "chosen the winner, so its numbers are a little too good; those of a test split are not.",
    ]
    chart_of_minutes = LineChart(f"{choice.metric} after each round", of_minutes, "minutes", (0, None), (0, None))
    chart_of_speed = LineChart(f"{choice.metric} against speed", of_speed, "images/s in PyTorch", (0, None), (0, None))
    shown = table(head, rows, text=(0, 2, 7))
    return shown + "".join(paragraph(note, "dim") for note in notes) + charts([chart_of_minutes, chart_of_speed])


def _worst_class(judgement: Judgement) -> str:
    """Return the class of smallest AP, of masks where there are any, with its AP."""
    ap = judgement.class_ap if judgement.class_mask_ap is None else judgement.class_mask_ap
    if not np.isfinite(ap).any():
        return "–"
    label = int(np.nanargmin(ap))
    return f"{judgement.matches.class_names[label]} {ap[label]:.3f}"
