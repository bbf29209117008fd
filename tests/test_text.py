"""Names of every nasty kind, wherever they are shown."""

import argparse
import io
import os
import re
import sys
import unicodedata
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure
from PIL import Image

from toolkit.base.text import (
    END_ISOLATE,
    ISOLATE,
    as_code,
    columns,
    did_you_mean,
    escaped,
    in_markdown,
    in_plot,
    lasting_console,
    shown,
)
from toolkit.data.table import Problem
from toolkit.detectors.scene_graphs.graph_pictures import _panel
from toolkit.evaluation.draw import MOST_TAGS, draw_detections, draw_grid, drawable
from toolkit.tools.arguments import ShortUsage

NASTY_NAMES = [
    "line\nbreak", "tab\tand\rreturn", "\x1b[31mred\x1b[0m", "\x1b]0;title\x07", "nul\x00", "bell\x07", "\x08\x08space",
    "$", "$x$", r"$\frac{1}$", "a|b", "<script>alert(1)</script>", "<img src=x onerror=y>", "&amp;", "`code`",
    "**bold**", "[link](http://x.y)", "# heading", "_hidden", "long " * 3000, "x" * 10**6, "\u05e9\u05dc\u05d5\u05dd",
    "\u0645\u0631\u062d\u0628\u0627", "\u202egnp.exe", "\u2066isolate", "\U0001f600",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467", "\u6771\u4eac", "e" + "\u0301" * 5000, "\ud800", "\udcff half",
    "\ue000", "\u2028separator", "\xa0", "\u3000wide", "%s %d {0} {name}", "../../etc", "a/b", "a.b", "'", '"', "\\",
    "\\n", "-", "cat", "cat ", "CON", "null", "AP/cat",
]  # fmt: skip
any_text = st.one_of(st.text(), st.text(alphabet=st.characters()), st.sampled_from(NASTY_NAMES))


@settings(max_examples=100, deadline=None)
@given(any_text, st.integers(12, 120))
def test_one_line_without_control_and_of_the_width_asked_for(text, limit):
    line = escaped(text, limit)
    assert columns(line) <= limit and len(line) <= 3 * limit
    assert not any(unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") for c in line)
    assert not set(line) & set("\u202a\u202b\u202d\u202e\u2066\u2067\u2068\u2069\u200e\u200f")
    line.encode()
    around = shown(text, limit)
    assert around in (line, f"{ISOLATE}{line}{END_ISOLATE}")
    written = in_markdown(text, limit)
    assert "\n" not in written and "<" not in written.replace("\\<", "")
    # CommonMark: a span ends with as many backticks as it begins with; one space on each side is taken off.
    marks, inside = re.fullmatch("(`+)(.*[^`])\\1", as_code(text, limit)).groups()
    assert marks not in re.findall("`+", inside)
    assert around == (inside[1:-1] if inside[0] == inside[-1] == " " else inside)


def test_how_it_looks():
    for name in ("cat", "traffic light", "na\xefve", "\u6771\u4eac", "\U0001f600", "a/b (3)"):
        assert escaped(name) == shown(name) == name
    assert escaped("a\nb\x1b[31m\u202e\ud800") == r"a\nb\x1b[31m\u202e\ud800"
    assert escaped("beginning" + "x" * 500 + "end.jpg", 20) == "beginningxx...nd.jpg"
    assert escaped("\xa0a\u3000") == " a "
    assert shown("\u05d0 1") == f"{ISOLATE}\u05d0 1{END_ISOLATE}"
    assert in_markdown("a|b <i> $x$ `c` *d*") == r"a\|b \<i\> \$x\$ \`c\` \*d\*"
    assert as_code("plate: <i>large_") == "`plate: <i>large_`" and as_code("a`b``") == "``` a`b`` ```"
    assert columns("\u6771\u4eac") == 4 and columns("e\u0301") == 1


def test_in_a_plot():
    figure = Figure()
    axes = figure.add_subplot()
    for name in NASTY_NAMES:
        axes.plot([1, 2], label=in_plot(name))
    assert len(axes.legend().get_texts()) == len(NASTY_NAMES)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")
        figure.savefig(io.BytesIO())


def test_in_pictures(tmp_path):
    count = len(NASTY_NAMES)
    image = torch.full((3, 200, 200), 90, dtype=torch.uint8)
    boxes = torch.arange(count * 4).reshape(count, 4).float() % 200
    found = {"boxes": boxes, "scores": torch.full((count,), 0.9), "labels": torch.arange(count)}
    for first in range(0, count, MOST_TAGS):  # more in one picture would have no tags
        some = {key: value[first : first + MOST_TAGS] for key, value in found.items()}
        draw_detections(image, some, NASTY_NAMES, tmp_path / f"a{first}.png")
        assert np.asarray(Image.open(tmp_path / f"a{first}.png")).std() > 5
    few = {key: value[:2] for key, value in found.items()}
    samples = [(image[:, :20, :20], few, {"name": name, "boxes": boxes[:3], "labels": torch.arange(3)})
               for name in NASTY_NAMES]  # fmt: skip
    draw_grid(samples, NASTY_NAMES, tmp_path / "b.png")
    rows, names = np.arange(count), [drawable(name) for name in NASTY_NAMES]
    ordered = np.sort(boxes.numpy().reshape(count, 2, 2), 1).reshape(count, 4)
    triplets = np.stack([rows, rows[::-1], rows], 1)
    _panel(Image.new("RGB", (200, 200)), ordered, rows, triplets, ["#000000"] * count, names, names, count)
    lacked = [drawable(name) for name in ("\u6771\u4eac", "\u5927\u962a", "\U0001f9ff", "\U0001f9fe", "cat")]
    assert lacked == ["<6771><4EAC>", "<5927><962A>", "<1F9FF>", "<1F9FE>", "cat"], "they stay apart"


def test_problems_are_one_line_each():
    for name in NASTY_NAMES:
        line = str(Problem("error", name, name, name, name))
        assert line.count("\n") == 0 and len(line) < 5000
        line.encode()


def test_a_console_without_the_letters(monkeypatch):
    for stream in ("stdout", "stderr"):
        monkeypatch.setattr(sys, stream, io.TextIOWrapper(io.BytesIO(), "ascii"))
    with lasting_console():
        print("na\xefve", "\u6771")
    assert sys.stdout.buffer.getvalue() == rb"na\xefve \u6771" + b"\n"


@pytest.mark.parametrize("end", ["reader gone", "disk full"])
def test_a_console_that_takes_nothing_ends_no_program(monkeypatch, end):
    reading, writing = os.pipe()
    os.close(reading)
    if end == "disk full":
        writing = os.open("/dev/full", os.O_WRONLY)
    with open(writing, "w") as console:
        monkeypatch.setattr(sys, "stdout", console)
        with pytest.raises(OSError):
            os.write(writing, b"plain")
        with lasting_console():
            print("dropped", flush=True)
            print("x" * 100_000)
        assert sys.stdout is console
        os.write(writing, b"child processes drop theirs too")


def test_the_usage_of_a_script_is_one_line():
    parser = argparse.ArgumentParser("predict.py", formatter_class=ShortUsage)
    parser.add_argument("model")
    parser.add_argument("images", nargs="*")
    parser.add_argument("--out", required=True)
    for number in range(30):
        parser.add_argument(f"--flag-{number}")
    assert parser.format_usage() == "usage: predict.py --out OUT model [images ...] [options]\n"
    assert "--flag-29 FLAG_29" in parser.format_help()


def test_the_nearest_names_of_a_wrong_one():
    names = ["detr", "rt_detr_v2", "ssd"]
    assert did_you_mean("dert", names) == "; did you mean detr?"
    assert did_you_mean("dert", names, written=repr, otherwise="there are three") == "; did you mean 'detr'?"
    assert did_you_mean("ss", ["ssd", "ssr"], most=2, written="a {}".format) == "; did you mean a ssr or a ssd?"
    assert did_you_mean("wheels", names) == "" and did_you_mean("dert", names, cutoff=0.9) == ""
    assert did_you_mean("wheels", names, otherwise="there are three") == "; there are three"
