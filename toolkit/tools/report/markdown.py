"""Writes the README of a run's report from the files in the run folder."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from toolkit.base.text import in_markdown, metric_text
from toolkit.evaluation.coco_numbers import COCO_METRICS
from toolkit.tools.report.charts import save_charts
from toolkit.tools.report.facts import RunFacts
from toolkit.tools.report.figures import LOSSES_HEADING, PRECISION_HEADING, training_charts

GRAPH_METRICS = ("R", "ngR", "zR", "mR", "ngmR", "A")


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
    words = [run.state] if run.state else []
    words += [f"step {last['step']}"] if "step" in last else ["no step yet"]
    words += [f"epoch {last['epoch']}"] if "epoch" in last else []
    words += [f"{last['time_s'] / 60:.1f} minutes"] if "time_s" in last else []
    return ", ".join(words)


def _numbers(rows: list[dict]) -> list[str]:
    """Return Markdown tables of the metrics and of the AP of each class: last and best evaluation, raw and EMA."""
    columns = {}
    graphs = any(row.get("val/R@100") is not None for row in rows)
    masks = any(row.get("val/segm_AP") is not None for row in rows)
    decisive = "R@100" if graphs else "segm_AP" if masks else "bbox_AP"
    for prefix, name in (("val/", "raw"), ("val/ema/", "EMA")):
        evaluated = [row for row in rows if row.get(f"{prefix}{decisive}") is not None]
        if evaluated:
            best = max(evaluated, key=lambda row: row[f"{prefix}{decisive}"])
            columns[f"{name}, last (step {evaluated[-1]['step']})"] = (prefix, evaluated[-1])
            columns[f"{name}, best (step {best['step']})"] = (prefix, best)
    if not columns:
        return ["No evaluation with ground truth yet."]
    metrics = [f"{name}@{k}" for name in GRAPH_METRICS for k in (20, 50, 100)] if graphs else []
    metrics += ["attribute_R_precision"] if any("val/attribute_R_precision" in row for row in rows) else []
    metrics += [f"bbox_{name}" for name in COCO_METRICS] if any("val/bbox_AP" in row for row in rows) else []
    metrics += [f"segm_{name}" for name in COCO_METRICS] if masks else []
    metrics += ["loss"]
    parts = ["## Numbers", _markdown(["metric", *columns], [_cells(m, columns) for m in metrics])]
    keys = (key for prefix, row in columns.values() for key in row if key.startswith(f"{prefix}AP/"))
    classes = list(dict.fromkeys(key.split("/AP/", 1)[1] for key in keys))
    if classes:
        cells = [[in_markdown(name), *_cells(f"AP/{name}", columns)[1:]] for name in classes]
        parts += ["## AP by class", _markdown(["class", *columns], cells)]
    return parts


def _cells(metric: str, columns: dict) -> list[str]:
    return [metric, *(metric_text(row.get(prefix + metric), 4) for prefix, row in columns.values())]


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
