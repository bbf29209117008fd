"""Charts of the page, and what they show of a training."""

import math
import re

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from toolkit.tools.report import figures
from toolkit.tools.report.charts import (
    MAX_POINTS,
    SERIES_COLOURS,
    BarChart,
    ChartLine,
    LineChart,
    figure,
    save_charts,
    svg,
)

EMPTY = [
    LineChart("x", [ChartLine("a", [], [])]),
    LineChart("x", [ChartLine("a", [1], [np.nan])]),
    LineChart("x", [ChartLine("a", [1, 2], [0, -1])], log=True),
    BarChart("x", []),
]


def test_charts_without_a_value_are_left_out(tmp_path):
    assert [svg(chart) for chart in EMPTY] == [""] * 4
    assert save_charts(EMPTY, tmp_path / "a.png") is None


def test_odd_values_are_drawn():
    one_point = svg(LineChart("x", [ChartLine("a", [1], [2])]))
    assert "<use" in one_point  # a dot
    odd = svg(LineChart("x", [ChartLine("a", [1, 2, 3], [1e-30, np.inf, 1e30])], log=True))
    assert "nan" not in odd
    assert "inf" not in odd
    many = ChartLine("a", range(10**5), np.random.default_rng(0).random(10**5))
    assert len(many.points()[0]) == MAX_POINTS


def test_faint_lines_do_not_set_the_ends_of_the_axis(tmp_path):
    lines = [ChartLine("", [1, 2], [0, 99], faint=True), ChartLine("a", [1, 2], [1, 2])]
    chart = LineChart("x", lines)
    assert figure([chart]).axes[0].get_ylim()[1] < 3
    path = save_charts([chart], tmp_path / "new" / "a.png")
    assert path.stat().st_size > 1000


def test_a_chart_has_the_colours_of_the_page_and_its_words_as_they_are():
    lines = [
        ChartLine("0.12345 <b>", [1, 2], [1, 2]),
        ChartLine("$x", [1, 2], [2, 1], 1),
        ChartLine("none", [], []),
    ]
    text = svg(LineChart("0.6789 & so", lines, "step"))
    for words in ("0.12345 &lt;b&gt;", ">$x<", "0.6789 &amp; so", "var(--c0)", "var(--c1)"):
        assert words in text
    assert "none<" not in text
    assert not re.search('#[0-9a-f]{6}[;"]', text)
    assert SERIES_COLOURS[1] == "#d55e00"


def test_texts_behind_bars_stay_in_the_frame():
    drawn = figure([BarChart("x", [("above", 0.987, "0.987 of 144"), ("on", 0.5, "0.500 of 9")], most=1)])
    FigureCanvasAgg(drawn).draw()
    (axes,) = drawn.axes
    assert max(text.get_window_extent().x1 for text in axes.texts) < axes.bbox.x1


def test_equal_rates_are_seen_both():
    rates = [{"step": step, "train/lr/a": 1e-3, "train/lr/b": 1e-3} for step in (1, 2)]
    charts = figures.training_charts(rates)[figures.LOSSES_HEADING]
    (chart,) = [chart for chart in charts if chart.title == "Learning rates"]
    assert [line.dashed for line in chart.lines] == [False, True]


def test_a_series_is_what_is_a_finite_number():
    rows = [
        {"step": 1, "a": 1.0},
        {"step": 2, "a": None},
        {"step": 3, "a": math.nan},
        {"step": 4, "a": 3},
    ]
    steps, values = figures.series(rows, "a")
    assert steps.tolist() == [1, 4]
    assert values.tolist() == [1, 3]
    assert [len(part) for part in figures.series(rows, "missing")] == [0, 0]


def test_smoothing_is_the_mean_of_a_window_and_passes_over_gaps():
    line = np.arange(50.0)
    assert figures.smoothed(line)[5:45] == pytest.approx(line[5:45])
    line[20] = np.nan
    assert np.isfinite(figures.smoothed(line)).all()
