"""Draws charts by matplotlib: as SVG in the colours of the page (light, dark, print), as PNG, and as `Figure`."""

import io
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy as np

from toolkit.base.text import in_plot
from toolkit.tools.report.style import STYLE

PALETTE = dict(re.findall(r"--(\w+):(#\w{6})", STYLE.partition("}")[0]))  # names in the page's style, on light
SERIES_COLOURS = [PALETTE[f"c{i}"] for i in range(8)]
INK, DIM, GRID = PALETTE["fg"], PALETTE["dim"], PALETTE["line"]
MAX_POINTS = 300  # of a line
LETTER_PX = 7.5  # width of a letter, as a browser shows it
LONG_NUMBER = re.compile(r"(?<!: )\b\d+\.\d+")  # coordinates, not a style
# In matplotlib's SVG: a style for all of the page, its font, sizes, names that nothing refers to, turns by nothing, and
# the "L" that a path repeats.
NEEDLESS = re.compile(
    r"<defs>\s*<style.*?</style>\s*</defs>|font-family: [^;\"]*;? ?|stroke-linecap: square;? ?"
    r"| (width|height)=\"[\d.]+pt\"| id=\"(?![mp][0-9a-f]{10}\")[^\"]*\"| transform=\"rotate\(-0[^\"]*\""
    r"|\nL(?= )|(?<=\n)\s+",
    re.DOTALL,
)


@dataclass
class ChartLine:
    """A line of a chart.

    Attributes:
        name: its name in the legend; "": the line is not in the legend.
        x, y: coordinates of the points, of the same length; points that are not finite are left out.
        colour: index in `SERIES_COLOURS`.
        dashed: draw a dashed line.
        dots: mark each point.
        faint: draw the line faintly behind the others, and ignore it for the range of the y axis.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    colour: int = 0
    dashed: bool = False
    dots: bool = False
    faint: bool = False

    def points(self, log: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Return x and y of at most `MAX_POINTS` finite points, evenly thinned; log: only points with y above 0."""
        x, y = np.asarray(self.x, dtype=float), np.asarray(self.y, dtype=float)
        can_be_drawn = np.isfinite(x) & np.isfinite(y)
        if log:
            can_be_drawn &= y > 0
        keep = np.flatnonzero(can_be_drawn)
        evenly = np.linspace(0, len(keep) - 1, min(len(keep), MAX_POINTS))
        keep = keep[np.unique(evenly.astype(int))]
        return x[keep], y[keep]


@dataclass
class LineChart:
    """A chart of lines.

    Attributes:
        x_range, y_range: ends of the axes; None: they follow from the data.
        log: the y axis is logarithmic.
        marks: vertical lines, as (x, text next to the line).
    """

    title: str
    lines: Sequence[ChartLine]
    x_label: str = ""
    x_range: tuple[float | None, float | None] = (None, None)
    y_range: tuple[float | None, float | None] = (None, None)
    log: bool = False
    marks: Sequence[tuple[float, str]] = ()

    @property
    def is_empty(self) -> bool:
        """Whether no line has a point to draw."""
        return not any(len(line.points(self.log)[0]) for line in self.lines)

    @property
    def size(self) -> tuple[float, float]:
        """The (width, height) in inches."""
        return 5.2, 3.3 + 0.17 * len(self._in_legend()) / self._columns()

    def draw(self, axes) -> None:
        """Draw the lines, marks and legend into matplotlib's `axes`."""
        if self.log:
            axes.set_yscale("log")
        for line in sorted(self.lines, key=lambda line: line.faint):
            limits = axes.get_ylim()
            x, y = line.points(self.log)
            if not len(x):
                continue
            style = {"linewidth": 0.8, "alpha": 0.3, "zorder": 1} if line.faint else {"linewidth": 1.6}
            style |= {
                "color": SERIES_COLOURS[line.colour % len(SERIES_COLOURS)],
                "label": in_plot(line.name) if line.name else "_",
            }
            marker = "o" if line.dots or len(x) == 1 else None
            axes.plot(
                x,
                y,
                "--" if line.dashed else "-",
                marker=marker,
                markersize=3,
                clip_on=line.faint or marker is None,  # a dot on the edge is shown whole
                **style,
            )
            if line.faint:
                axes.set_ylim(limits)
        for x, text in self.marks:
            axes.axvline(x, color=INK, linewidth=1, linestyle="--")
            side = {"xytext": (-5, 0), "ha": "right"} if x > 0.5 else {"xytext": (5, 0), "ha": "left"}
            axes.annotate(
                text,
                (x, 0.03),
                xycoords=("data", "axes fraction"),
                textcoords="offset points",
                **side,
            )
        axes.grid(color=GRID, clip_on=False)
        axes.set(xlabel=self.x_label, xlim=self.x_range, ylim=self.y_range)
        if self.log:
            from matplotlib.ticker import LogFormatter  # which writes no powers

            axes.yaxis.set_major_formatter(LogFormatter())
            axes.yaxis.set_minor_formatter(LogFormatter())
        if len(self._in_legend()) > 1:
            position = {"loc": "upper left", "bbox_to_anchor": (0, -0.15), "ncols": self._columns()}
            axes.legend(**position, frameon=False, fontsize=9, labelcolor=DIM)

    def _in_legend(self) -> list[str]:
        return [line.name for line in self.lines if line.name and len(line.points(self.log)[0])]

    def _columns(self) -> int:
        longest_name = max(map(len, self._in_legend()), default=0)
        fitting = 64 // (8 + longest_name)
        return max(1, min(4, fitting))


@dataclass
class BarChart:
    """A chart of horizontal bars.

    Attributes:
        bars: (name, value of at least 0, text behind the bar) of each bar.
        most: value at the end of the axis; None: the largest value.
    """

    title: str
    bars: Sequence[tuple[str, float, str]]
    most: float | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there are no bars."""
        return not self.bars

    @property
    def size(self) -> tuple[float, float]:
        """The (width, height) in inches."""
        return 5.2, 0.4 + 0.24 * len(self.bars)

    def draw(self, axes) -> None:
        """Draw the bars into matplotlib's `axes`, the first on top."""
        names, values, texts = zip(*self.bars, strict=True)
        drawn = axes.barh(range(len(names)), values, color=SERIES_COLOURS[0])
        axes.bar_label(drawn, texts, padding=4, color=DIM)
        axes.set_yticks(range(len(names)), map(in_plot, names))
        axes.set_xticks([])
        # Room for the text behind the longest bar.
        of_names = LETTER_PX * max(map(len, names))
        of_texts = LETTER_PX * (1 + max(map(len, texts)))
        bars_px = max(0.9 * 96 * self.size[0] - of_names, 2 * of_texts)
        most = max(self.most or max(values), 1e-12)
        axes.set_xlim(0, most * bars_px / (bars_px - of_texts))
        axes.invert_yaxis()


@dataclass
class MatrixChart:
    """A chart of a matrix of counts (rows, columns); a cell is darker the larger its share of the row."""

    title: str
    matrix: np.ndarray
    row_names: Sequence[str]
    column_names: Sequence[str]
    row_label: str = ""
    column_label: str = ""

    @property
    def is_empty(self) -> bool:
        """Whether all counts are 0."""
        return not self.matrix.any()

    @property
    def size(self) -> tuple[float, float]:
        """The (width, height) in inches."""
        rows, columns = self.matrix.shape
        return 2.5 + 0.4 * columns, 2.0 + 0.3 * rows

    def draw(self, axes) -> None:
        """Draw the cells that are not 0, with their counts, into matplotlib's `axes`."""
        cells = np.argwhere(self.matrix)
        counts = self.matrix[tuple(cells.T)]
        totals = self.matrix.sum(axis=1)[cells[:, 0]]
        shades = [(SERIES_COLOURS[0], 0.75 * share) for share in counts / totals]
        axes.bar(
            cells[:, 1],
            1,
            1,
            bottom=cells[:, 0] - 0.5,
            color=shades,
        )
        for (i, j), count in zip(cells.tolist(), counts.tolist(), strict=True):
            axes.text(
                j,
                i,
                count,
                ha="center",
                va="center",
                color=INK,
                fontsize=8,
            )
        rows, columns = self.matrix.shape
        axes.set(
            xlim=(-0.5, columns - 0.5),
            ylim=(rows - 0.5, -0.5),
            xlabel=self.column_label,
            ylabel=self.row_label,
        )
        axes.set_xticks(
            range(columns),
            [in_plot(name) for name in self.column_names],
            rotation=90,
        )
        axes.set_yticks(range(rows), [in_plot(name) for name in self.row_names])


Chart = LineChart | BarChart | MatrixChart


def figure(charts: Sequence[Chart], titles: bool = True):
    """Return a matplotlib `Figure` with the charts, two in a row. titles: whether to write a chart's title above it."""
    from matplotlib.figure import Figure  # half a second that would delay the start of a run

    columns = min(2, len(charts))
    heights = []
    for i in range(0, len(charts), columns):
        of_row = charts[i : i + columns]
        heights.append(max(chart.size[1] for chart in of_row))
    whole = Figure(
        (columns * max(chart.size[0] for chart in charts), sum(heights)),
        layout="constrained",
    )
    grid = whole.add_gridspec(len(heights), columns, height_ratios=heights)
    for index, chart in enumerate(charts):
        axes = whole.add_subplot(grid[divmod(index, columns)], facecolor="none")
        axes.spines[:].set_color(GRID)
        axes.tick_params(which="both", left=False, bottom=False, labelcolor=DIM, labelsize=9)
        axes.xaxis.label.set_color(DIM)
        axes.yaxis.label.set_color(DIM)
        axes.locator_params(nbins=6)
        axes.set_axisbelow(True)
        axes.set_title(chart.title if titles else "", fontsize=11)
        chart.draw(axes)
    return whole


def save_charts(charts: Sequence[Chart], path: Path) -> Path | None:
    """Save all charts that are not empty as one PNG file, and return the file; None if all are empty."""
    shown = [chart for chart in charts if not chart.is_empty]
    if not shown:
        return None
    path.parent.mkdir(parents=True, exist_ok=True)
    _save(figure(shown), path, dpi=100)
    return path


def svg(chart: Chart) -> str:
    """Return a chart as an HTML `<figure>` with SVG, or "" for an empty chart."""
    if chart.is_empty:
        return ""
    drawn = figure([chart], titles=False)
    stream = io.StringIO()
    drawn.patch.set_visible(False)
    _save(
        drawn,
        stream,
        format="svg",
        metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")),
    )
    text = stream.getvalue()
    text = re.sub(NEEDLESS, "", text[text.index("<svg") :])
    text = re.sub(
        r"<[^>]*>",
        lambda tag: re.sub(LONG_NUMBER, lambda n: f"{float(n[0]):.1f}", tag[0]),
        text,
    )
    for name, colour in PALETTE.items():
        text = text.replace(colour, f"var(--{name})")
    title = escape(chart.title, quote=True)
    width = 96 * chart.size[0]
    text = text.replace(
        "<svg ",
        f'<svg role="img" aria-label="{title}" style="width:{width:.0f}px" ',
        1,
    )
    return f"<figure><figcaption>{title}</figcaption>{text}</figure>"


def _save(drawn, target, **options) -> None:
    from matplotlib import rc_context

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "charts"}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # letters of other scripts, which a browser has
        drawn.savefig(target, **options)
