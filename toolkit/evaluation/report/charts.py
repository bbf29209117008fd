"""Charts as SVG inside the page: they follow its colours (light, dark, print) and need no script."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

WIDTH, HEIGHT = 480, 300
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 12, 40
COLOURS = 8  # classes c0 ... c7 of the page's style
MOST_POINTS = 300  # of a line


@dataclass
class Line:
    """x, y: of the same length. dashed, dots: how it is drawn. faint: behind the others, not in the legend."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    colour: int = 0
    dashed: bool = False
    dots: bool = False
    faint: bool = False


def line_chart(
    title: str,
    lines: Sequence[Line],
    *,
    x_label: str = "",
    x_range: tuple[float, float] | None = None,
    y_range: tuple[float, float] | None = None,
    log: bool = False,
    marks: Sequence[tuple[float, str]] = (),
) -> str:
    """A `<figure>`; empty text without a point to draw. log: of y. marks: upright lines (x, text)."""
    data = [(line, *_finite(line.x, line.y, log)) for line in lines]
    data = [(line, x, y) for line, x, y in data if len(x)]
    if not data:
        return ""
    x_low, x_high = x_range or _range(np.concatenate([x for _, x, _ in data]), 0.0)
    y_all = np.concatenate([y for line, _, y in data if not line.faint] or [y for _, _, y in data])
    y_low, y_high = y_range or _range(np.log10(y_all) if log else y_all, 0.05)

    def sx(value):
        return LEFT + (np.asarray(value) - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)

    def sy(value):
        value = np.log10(value) if log else np.asarray(value)
        return HEIGHT - BOTTOM - (np.clip(value, y_low, y_high) - y_low) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)

    parts = [_axes(x_low, x_high, y_low, y_high, sx, log, x_label)]
    for line, x, y in data:
        points = [f"{a:.1f},{b:.1f}" for a, b in zip(sx(x), sy(y), strict=True)]
        style = f"c{line.colour % COLOURS}" + " dashed" * line.dashed + " faint" * line.faint
        parts.append(f'<polyline class="line {style}" points="{" ".join(points)}"/>')
        if line.dots or len(points) == 1:
            parts += [
                f'<circle class="dot {style}" cx="{p.split(",")[0]}" cy="{p.split(",")[1]}" r="2.5"/>' for p in points
            ]
    for x, text in marks:
        at = float(sx(x))
        side = "end" if at > WIDTH / 2 else "start"
        parts.append(
            f'<line class="mark" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
            f'<text x="{at + (-5 if side == "end" else 5):.1f}" y="{HEIGHT - BOTTOM - 8}" text-anchor="{side}">'
            f"{escape(text)}</text>"
        )
    named = [line for line, _, _ in data if not line.faint]
    return _figure(title, parts, named if len(named) > 1 else [])


def bar_chart(title: str, bars: Sequence[tuple[str, float, str]], most: float | None = None) -> str:
    """Bars that lie, one a row: name, value from 0, text behind it; longest = `most` or the largest value."""
    if not bars:
        return ""
    most = max(most or max((value for _, value, _ in bars), default=0), 1e-12)
    rows = "".join(
        f'<div class="bar-name">{escape(name)}</div><div class="bar"><span style="width:'
        f'{100 * min(max(value, 0) / most, 1):.1f}%"></span></div><div class="bar-text">{escape(text)}</div>'
        for name, value, text in bars
    )
    return f'<figure><figcaption>{escape(title)}</figcaption><div class="bars">{rows}</div></figure>'


def _figure(title: str, parts: Sequence[str], legend: Sequence[Line]) -> str:
    names = "".join(
        f'<span class="key c{line.colour % COLOURS}{" dashed" * line.dashed}">{escape(line.name)}</span>'
        for line in legend
    )
    return (
        f'<figure><figcaption>{escape(title)}</figcaption><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(title, quote=True)}">{"".join(parts)}</svg>'
        f"{f'<div class=legend>{names}</div>' if names else ''}</figure>"
    )


def _axes(x_low, x_high, y_low, y_high, sx, log: bool, x_label: str) -> str:
    parts = []
    for value in _ticks(x_low, x_high, 6):
        at = float(sx(value))
        parts.append(
            f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
            f'<text x="{at:.1f}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">{_tick(value)}</text>'
        )
    for value in _ticks(y_low, y_high, 5):
        at = HEIGHT - BOTTOM - (value - y_low) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
            f'<text x="{LEFT - 5}" y="{at + 4:.1f}" text-anchor="end">'
            f"{_tick(10**value if log else value)}</text>"
        )
    if x_label:
        parts.append(
            f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x_label)}</text>'
        )
    return "".join(parts)


def _ticks(low: float, high: float, about: int) -> list[float]:
    step = 10 ** math.floor(math.log10((high - low) / about))
    step *= next(factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) <= about)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _tick(value: float) -> str:
    if value and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")
    return f"{value:.4g}"


def _range(values: np.ndarray, margin: float) -> tuple[float, float]:
    low, high = float(values.min()), float(values.max())
    if high - low < 1e-12 * max(1.0, abs(high)):
        low, high = low - max(0.5 * abs(low), 0.5e-3), high + max(0.5 * abs(high), 0.5e-3)
    return low - margin * (high - low), high + margin * (high - low)


def _finite(x, y, log: bool) -> tuple[np.ndarray, np.ndarray]:
    """Without what cannot be drawn, and thinned evenly to what can be seen."""
    x, y = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    keep = np.isfinite(x) & np.isfinite(y) & (y > 0 if log else True)
    x, y = x[keep], y[keep]
    if len(x) > MOST_POINTS:
        rows = np.unique(np.linspace(0, len(x) - 1, MOST_POINTS).astype(int))
        x, y = x[rows], y[rows]
    return x, y
