"""Writes the README of a run's report from the files in the run folder."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from toolkit.base.text import in_markdown, metric_text
from toolkit.evaluation.shown_metrics import metrics_of
from toolkit.tools.report.charts import save_charts
from toolkit.tools.report.facts import RunFacts
from toolkit.tools.report.figures import LOSSES_HEADING, PRECISION_HEADING, training_charts


def plot_curves(rows: Sequence[Mapping], out_folder: Path) -> list[Path]:
    """Draw `curves.png` (losses, learning rates, gradient norm) and `ap.png` (AP, recall of relations) from the rows of
    metrics.jsonl, and return the files that were written.

    Charts without data are left out; a file without any chart is not written.
    """
    groups = training_charts(rows)
    files = {"curves.png": groups[LOSSES_HEADING], "ap.png": groups[PRECISION_HEADING]}
    written = [save_charts(charts, Path(out_folder) / name) for name, charts in files.items()]
    return [path for path in written if path is not None]


def write_markdown(run_folder: Path, run: RunFacts) -> Path:
    """Write `report/README.md` with curves, final metrics, newest pictures, settings and environment of a run, and
    return the file.

    An existing README is replaced. What is missing in the run folder is left out.
    """
    run_folder = Path(run_folder)
    report = run_folder / "report"
    report.mkdir(parents=True, exist_ok=True)
    curves = plot_curves(run.rows, report)
    parts = [f"# {run_folder.name}", _state(run), *_numbers(run.rows)]
    parts.append("More, with what is wrong and which threshold to deploy: [index.html](index.html).")
    parts += [f"![{path.stem}]({path.name})" for path in reversed(curves)]
    pictures = sorted(report.glob("pictures/*.png"))
    if pictures:
        newest = pictures[-1].relative_to(report).as_posix()
        parts += [f"## Predictions\n\nGround truth left, predictions right ({pictures[-1].stem}).", f"![]({newest})"]
    parts += _settings(run)
    readme = report / "README.md"
    readme.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return readme


def _state(run: RunFacts) -> str:
    last = run.rows[-1] if run.rows else {}
    words = [] if "step" in last else ["no step yet"]
    words += [f"step {last['step']}"] if "step" in last and not run.state else []
    words += [f"epoch {last['epoch']}"] if "epoch" in last else []
    words += [f"{last['time_s'] / 60:.1f} minutes"] if "time_s" in last else []
    text = ", ".join(words)
    return f"{run.state} {text[:1].upper()}{text[1:]}.".lstrip()


def _numbers(rows: list[dict]) -> list[str]:
    """Return Markdown tables of the metrics and of the AP of each class: last and best evaluation, raw and EMA."""
    columns = _evaluations(rows)
    if not columns:
        return ["No evaluation with ground truth yet."]
    metrics = metrics_of(columns.values(), "relations", "attributes", "boxes", "masks")
    of_metrics = {key: key for key in [*(metric.key for metric in metrics), "loss"]}
    parts = ["## Numbers", _table("metric", of_metrics, columns)]
    of_classes = {}
    for row in columns.values():
        of_classes |= {key: in_markdown(key.removeprefix("AP/")) for key in row if key.startswith("AP/")}
    if of_classes:
        parts += ["## AP by class", _table("class", of_classes, columns)]
    return parts


def _evaluations(rows: list[dict]) -> dict[str, dict]:
    """Return the metrics of the last and of the best evaluation of the weights, and of their EMA, by a description."""
    decisive = "bbox_AP"
    for key in ("segm_AP", "R@100"):
        if any(row.get(f"val/{key}") is not None for row in rows):
            decisive = key
    columns = {}
    for name, prefix in (("raw", "val/"), ("EMA", "val/ema/")):
        evaluated = [row for row in rows if row.get(prefix + decisive) is not None]
        if evaluated:
            best = max(evaluated, key=lambda row: row[prefix + decisive])
            columns[f"{name}, last (step {evaluated[-1]['step']})"] = _without_prefix(evaluated[-1], prefix)
            columns[f"{name}, best (step {best['step']})"] = _without_prefix(best, prefix)
    return columns


def _without_prefix(row: Mapping, prefix: str) -> dict:
    return {key.removeprefix(prefix): value for key, value in row.items() if key.startswith(prefix)}


def _table(head: str, names: Mapping[str, str], columns: Mapping[str, Mapping]) -> str:
    """Return a Markdown table with a line for each key in `names`, which is shown by its name, and a column for each
    evaluation."""
    lines = []
    for key, name in names.items():
        lines.append([name, *(metric_text(row.get(key), 4) for row in columns.values())])
    return _markdown([head, *columns], lines)


def _settings(run: RunFacts) -> list[str]:
    parts = []
    if run.config_text:
        parts += [f"## Settings ({run.config_name})", f"```yaml\n{run.config_text.rstrip()}\n```"]
    if run.environment_text:
        text = json.dumps(json.loads(run.environment_text), indent=2, ensure_ascii=False)
        parts += ["## Environment", f"```json\n{text}\n```"]
    return parts


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [
        head,
        ["---", *["---:"] * (len(head) - 1)],
        *rows,
    ]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
