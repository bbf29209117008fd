"""Curves as PNG and the README of a run's report, made from the files of its folder alone."""

import json
import re
from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path

import numpy as np

from toolkit.evaluation.draw import COLOURS
from toolkit.evaluation.report.facts import RunFacts
from toolkit.text import in_markdown, in_plot

LINES = tuple(c for c in COLOURS if c not in ("#F0E442", "#DDCC77"))  # without the yellows: the paper is white
STYLES = ("-", "--", ":", "-.")
BLUE, VERMILION, GREEN = COLOURS[4], COLOURS[5], COLOURS[2]
BOX_METRICS = ("AP", "AP50", "AP75", "APs", "APm", "APl", "AR1", "AR10", "AR100", "ARs", "ARm", "ARl")
GRAPH_METRICS = ("R", "ngR", "zR", "mR", "ngmR", "A")
LAYER = re.compile(r"(_(\d+|aux|enc|dn|pre))+$")  # the endings of auxiliary layers, as in toolkit.step.losses


def series(rows: Sequence[dict], key: str) -> tuple[np.ndarray, np.ndarray]:
    """(steps, values) of the rows that have a finite number for `key`."""
    pairs = [(row["step"], row[key]) for row in rows if isinstance(row.get(key), int | float) and isfinite(row[key])]
    steps, values = np.array(pairs, dtype=float).reshape(-1, 2).T
    return steps, values


def smoothed(values: np.ndarray, share: float = 0.05) -> np.ndarray:
    """Mean over a centred window of `share` of the points (at least 5), shorter at both ends, of what is finite."""
    half = max(2, int(len(values) * share) // 2)
    finite = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    low, high = np.maximum(np.arange(len(values)) - half, 0), np.minimum(np.arange(len(values)) + half + 1, len(values))
    with np.errstate(invalid="ignore"):
        return (sums[high] - sums[low]) / (counts[high] - counts[low])


def plot_curves(rows: Sequence[Mapping], out_folder: Path) -> list[Path]:
    """`curves.png` (losses, learning rates, gradient norm), `ap.png` (AP, AP50, AP by class; raw and EMA) and, of scene
    graphs, `recall.png`, out of the rows of metrics.jsonl.

    Columns that are missing leave their panel out; a picture without any panel is not written.

    Returns:
        The files written.
    """
    names = list(dict.fromkeys(key for row in rows for key in row))
    panels = [_loss_panel, _terms_panel, _auxiliary_panel, _lr_panel, _norm_panel]
    written = [
        _picture(rows, names, panels, Path(out_folder) / "curves.png"),
        _picture(rows, names, [_ap_panel, _class_panel], Path(out_folder) / "ap.png"),
        _picture(rows, names, [_recall_panel], Path(out_folder) / "recall.png"),
    ]
    return [path for path in written if path is not None]


def _picture(rows: list[dict], names: list[str], panels: Sequence, path: Path) -> Path | None:
    """Draw the panels that have something to show below each other, two in a row."""
    # Here: at the start of a run nobody waits for half a second of matplotlib.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4), layout="constrained")
    FigureCanvasAgg(figure)
    shown = [panel for panel in panels if panel(figure.add_subplot(), rows, names)]
    if not shown:
        return None
    columns = min(2, len(shown))
    lines = -(-len(shown) // columns)
    figure = Figure(figsize=(6.5 * columns, 4 * lines), layout="constrained")
    FigureCanvasAgg(figure)
    for i, panel in enumerate(shown, start=1):
        axes = figure.add_subplot(lines, columns, i)
        panel(axes, rows, names)
        axes.set_xlabel("optimizer step")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    return path


def _line(axes, rows, key: str, label: str, colour: str, raw: bool = True, **style) -> bool:
    """A smoothed line over its faint raw values; short series are drawn as they are."""
    steps, values = series(rows, key)
    if not len(steps):
        return False
    if len(steps) >= 20:
        if raw:
            axes.plot(steps, values, color=colour, alpha=0.25, linewidth=0.8)
        values = smoothed(values)
    axes.plot(steps, values, color=colour, label=label, **style)
    return True


def _loss_panel(axes, rows, names) -> bool:
    drawn = _line(axes, rows, "train/loss", "training", BLUE)
    for key, label, colour in (("val/loss", "validation", VERMILION), ("val/ema/loss", "validation, EMA", GREEN)):
        drawn |= _line(axes, rows, key, label, colour, marker="o", markersize=3)
    axes.set_title("total loss")
    return _legend(axes, drawn)


def _terms(names: Sequence[str]) -> list[str]:
    """Weighted losses: `train/<name>` with an unweighted partner."""
    present = set(names)
    return [n for n in names if n.startswith("train/") and f"{n}_unscaled" in present and n != "train/loss"]


def _terms_panel(axes, rows, names) -> bool:
    main = [n for n in _terms(names) if not LAYER.search(n)]
    for i, name in enumerate(main):
        _line(axes, rows, name, name.removeprefix("train/"), LINES[i % len(LINES)])
    axes.set_title("weighted loss terms" + (", last layer" if len(main) < len(_terms(names)) else ""))
    return _legend(axes, bool(main))


def _auxiliary_panel(axes, rows, names) -> bool:
    layers = [n for n in _terms(names) if LAYER.search(n)]
    bases = list(dict.fromkeys(LAYER.sub("", n) for n in layers))
    seen = set()
    for name in layers:
        base = LAYER.sub("", name)
        label = None if base in seen else f"{base.removeprefix('train/')}_*"
        seen.add(base)
        colour = LINES[bases.index(base) % len(LINES)]
        _line(axes, rows, name, label, colour, raw=False, linewidth=0.9, alpha=0.8)
    axes.set_title("weighted loss terms, auxiliary layers")
    return _legend(axes, bool(layers))


def _lr_panel(axes, rows, names) -> bool:
    groups = [n for n in names if n.startswith("train/lr/")]
    drawn = False
    for i, name in enumerate(groups):
        steps, values = series(rows, name)
        axes.plot(
            steps,
            values,
            STYLES[i % 4],  # groups often share a learning rate
            color=LINES[i % len(LINES)],
            label=name.removeprefix("train/lr/"),
        )
        drawn |= bool(len(steps))
    axes.set_title("learning rate")
    axes.set_ylim(bottom=0)
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
    return _legend(axes, drawn)


def _norm_panel(axes, rows, names) -> bool:
    drawn = _line(axes, rows, "train/grad_norm", "before clipping", BLUE)
    values = series(rows, "train/grad_norm")[1]
    if drawn and (values > 0).any():
        axes.set_yscale("log")
    axes.set_title("gradient norm")
    return drawn


def _ap_panel(axes, rows, names) -> bool:
    drawn = False
    for metric, colour in (("bbox_AP", BLUE), ("bbox_AP50", VERMILION)):
        for prefix, label, style in (("val/", "", "-"), ("val/ema/", ", EMA", "--")):
            steps, values = series(rows, prefix + metric)
            axes.plot(steps, values, style, marker="o", markersize=3, color=colour, label=metric[5:] + label)
            drawn |= bool(len(steps))
    axes.set_title("COCO AP on the validation data")
    _share_of_one(axes)
    return _legend(axes, drawn)


def _class_panel(axes, rows, names) -> bool:
    """AP of at most ten classes, the best at the end first; the legend in that order."""
    prefix = "val/ema/AP/" if any(n.startswith("val/ema/AP/") for n in names) else "val/AP/"
    curves = {n.removeprefix(prefix): series(rows, n) for n in names if n.startswith(prefix)}
    curves = {name: curve for name, curve in curves.items() if len(curve[0])}
    chosen = sorted(curves, key=lambda name: -curves[name][1][-1])
    if len(chosen) > 10:
        chosen = chosen[:5] + chosen[-5:]
    for i, name in enumerate(chosen):
        style = {"color": LINES[i % len(LINES)], "linestyle": STYLES[i // len(LINES)]}
        axes.plot(*curves[name], marker="o", markersize=3, label=in_plot(name), **style)
    many = " (five best and five worst)" if len(curves) > 10 else ""
    axes.set_title(f"AP by class{', EMA' if 'ema' in prefix else ''}{many}")
    _share_of_one(axes)
    return _legend(axes, bool(chosen))


def _recall_panel(axes, rows, names) -> bool:
    drawn = False
    for i, metric in enumerate(("R@20", "R@50", "R@100", "mR@20", "mR@50", "mR@100")):
        for prefix, label in (("val/", ""), ("val/ema/", ", EMA")):
            drawn |= _line(axes, rows, prefix + metric, metric + label, LINES[i], marker="o", markersize=3,
                           linestyle="--" if label else "-")  # fmt: skip
    axes.set_title("recall of relations on the validation data")
    _share_of_one(axes)
    return _legend(axes, drawn)


def _share_of_one(axes) -> None:
    """From 0 to somewhat above the highest point, at most 1: low AP stays readable."""
    axes.set_ylim(0, min(1.0, max(0.05, 1.15 * axes.dataLim.y1)) if np.isfinite(axes.dataLim.y1) else 1.0)


def _legend(axes, drawn: bool) -> bool:
    if drawn:
        axes.legend(frameon=False, fontsize=8, ncols=2 if len(axes.get_legend_handles_labels()[1]) > 6 else 1)
    return drawn


def write_markdown(run_folder: Path, facts: RunFacts) -> Path:
    """`report/README.md` with curves, the final numbers, the newest pictures, settings and surroundings of a run.

    Whatever is missing in the run folder is missing in the report. Made anew each time.

    Returns:
        The README.
    """
    run_folder = Path(run_folder)
    report = run_folder / "report"
    report.mkdir(parents=True, exist_ok=True)
    curves = plot_curves(facts.rows, report)
    parts = [f"# {run_folder.name}", _state(facts), *_numbers(facts.rows)]
    parts.append("More, with what is wrong and which threshold to deploy: [index.html](index.html).")
    parts += [f"![{path.stem}]({path.name})" for path in reversed(curves)]
    if pictures := sorted(report.glob("pictures/*.png")):
        newest = pictures[-1].relative_to(report).as_posix()
        parts += [f"## Predictions\n\nGround truth left, predictions right ({pictures[-1].stem}).", f"![]({newest})"]
    parts += _settings(facts)
    readme = report / "README.md"
    readme.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return readme


def _state(facts: RunFacts) -> str:
    last = facts.rows[-1] if facts.rows else {}
    words = [facts.state] if facts.state else []
    words += [f"step {last['step']}"] if "step" in last else ["no step yet"]
    words += [f"epoch {last['epoch']}"] if "epoch" in last else []
    words += [f"{last['time_s'] / 60:.1f} minutes"] if "time_s" in last else []
    return ", ".join(words)


def _numbers(rows: list[dict]) -> list[str]:
    """Markdown tables of the twelve numbers and of the classes: last and best evaluation, raw and EMA."""
    columns, graphs = {}, any(row.get("val/R@100") is not None for row in rows)
    decisive = "R@100" if graphs else "bbox_AP"
    for prefix, name in (("val/", "raw"), ("val/ema/", "EMA")):
        evaluated = [row for row in rows if row.get(f"{prefix}{decisive}") is not None]
        if evaluated:
            best = max(evaluated, key=lambda row: row[f"{prefix}{decisive}"])
            columns[f"{name}, last (step {evaluated[-1]['step']})"] = (prefix, evaluated[-1])
            columns[f"{name}, best (step {best['step']})"] = (prefix, best)
    if not columns:
        return ["There is no evaluation with ground truth yet."]
    metrics = [f"{name}@{k}" for name in GRAPH_METRICS for k in (20, 50, 100)] if graphs else []
    metrics += ["attribute_R_precision"] if any("val/attribute_R_precision" in row for row in rows) else []
    metrics += [f"bbox_{name}" for name in BOX_METRICS] if any("val/bbox_AP" in row for row in rows) else []
    metrics += ["loss"]
    parts = ["## Numbers", _markdown(["metric", *columns], [_cells(m, columns) for m in metrics])]
    classes = list(dict.fromkeys(
        key.split("/AP/", 1)[1] for prefix, row in columns.values() for key in row if key.startswith(f"{prefix}AP/")
    ))  # fmt: skip
    if classes:
        cells = [[in_markdown(name), *_cells(f"AP/{name}", columns)[1:]] for name in classes]
        parts += ["## AP by class", _markdown(["class", *columns], cells)]
    return parts


def _cells(metric: str, columns: dict) -> list[str]:
    return [metric, *(_number(row.get(prefix + metric)) for prefix, row in columns.values())]


def _settings(facts: RunFacts) -> list[str]:
    parts = []
    if facts.config_text:
        parts += [f"## Settings ({facts.config_name})", f"```yaml\n{facts.config_text.rstrip()}\n```"]
    if facts.environment_text:
        text = json.dumps(json.loads(facts.environment_text), indent=2, ensure_ascii=False)
        parts += ["## Environment", f"```json\n{text}\n```"]
    return parts


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
