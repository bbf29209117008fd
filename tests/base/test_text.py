"""Names of every nasty kind are one line that controls neither a terminal nor a page, and printing never ends a run."""

import io
import os
import re
import sys
import unicodedata
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure
from nasty_names import NASTY_NAMES

from toolkit.base.text import (
    END_ISOLATE,
    ISOLATE,
    as_code,
    columns,
    did_you_mean,
    escaped,
    first_names,
    in_markdown,
    in_plot,
    lasting_console,
    shown,
)
from toolkit.data.table import Problem

any_text = st.one_of(st.text(), st.text(alphabet=st.characters()), st.sampled_from(NASTY_NAMES))


@settings(max_examples=100, deadline=None)
@given(any_text, st.integers(12, 120))
def test_any_text_is_one_line_without_control_and_of_the_width_asked_for(text, limit):
    line = escaped(text, limit)
    assert columns(line) <= limit
    assert len(line) <= 3 * limit
    assert not {unicodedata.category(letter) for letter in line} & {"Cc", "Cs", "Zl", "Zp"}
    assert not set(line) & set("\u202a\u202b\u202d\u202e\u2066\u2067\u2068\u2069\u200e\u200f")
    line.encode()
    around = shown(text, limit)
    assert around in (line, f"{ISOLATE}{line}{END_ISOLATE}")
    assert "<" not in in_markdown(text, limit).replace("\\<", "")
    # CommonMark: a span ends with as many backticks as it begins with; one space on each side is taken off.
    marks, inside = re.fullmatch("(`+)(.*[^`])\\1", as_code(text, limit)).groups()
    assert marks not in re.findall("`+", inside)
    assert around == (inside[1:-1] if inside[0] == inside[-1] == " " else inside)


@pytest.mark.parametrize("name", ["traffic light", "na\xefve", "\u6771\u4eac", "\U0001f600", "a/b (3)"])
def test_plain_names_stay(name):
    assert shown(name) == name


def test_the_first_of_many_names_are_told():
    assert first_names(["a", "b", "c"]) == "a, b, c"
    assert first_names(["a", "b", "c", "d"]) == "a, b, c, ..."
    assert first_names([1, "2"], 1, repr) == "1, ..."


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (escaped("a\nb\x1b[31m\u202e\ud800"), r"a\nb\x1b[31m\u202e\ud800"),
        (escaped("beginning" + "x" * 500 + "end.jpg", 20), "beginningxx...nd.jpg"),
        (escaped("\xa0a\u3000"), " a "),
        (shown("\u05d0 1"), f"{ISOLATE}\u05d0 1{END_ISOLATE}"),
        (in_markdown("a|b <i> $x$ `c` *d*"), r"a\|b \<i\> \$x\$ \`c\` \*d\*"),
        (as_code("plate: <i>large_"), "`plate: <i>large_`"),
        (as_code("a`b``"), "``` a`b`` ```"),
        (columns("\u6771\u4eac"), 4),
        (columns("e\u0301"), 1),
    ],
)
def test_how_text_looks(written, expected):
    assert written == expected


def test_labels_of_a_plot_are_all_shown():
    figure = Figure()
    axes = figure.add_subplot()
    for name in NASTY_NAMES:
        axes.plot([1, 2], label=in_plot(name))
    assert len(axes.legend().get_texts()) == len(NASTY_NAMES)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")
        figure.savefig(io.BytesIO())


@pytest.mark.parametrize("name", NASTY_NAMES, ids=range(len(NASTY_NAMES)))
def test_a_problem_of_data_is_one_line(name):
    line = str(Problem("error", name, name, name, name))
    assert "\n" not in line
    assert len(line) < 5000
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


NAMES = ["detr", "rt_detr_v2", "ssd"]


@pytest.mark.parametrize(
    ("word", "names", "options", "expected"),
    [
        ("dert", NAMES, {}, "; did you mean detr?"),
        ("dert", NAMES, {"written": repr, "otherwise": "there are three"}, "; did you mean 'detr'?"),
        ("dert", NAMES, {"cutoff": 0.9}, ""),
        (
            "ss",
            ["ssd", "ssr"],
            {"most": 2, "written": "a {}".format},
            "; did you mean a ssr or a ssd?",
        ),
        ("wheels", NAMES, {}, ""),
        ("wheels", NAMES, {"otherwise": "there are three"}, "; there are three"),
    ],
)
def test_the_nearest_names_of_a_wrong_one(word, names, options, expected):
    assert did_you_mean(word, names, **options) == expected
