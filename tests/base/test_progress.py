"""How far a piece of work is, for those who wait for it."""

import pytest

from toolkit.base import progress
from toolkit.base.progress import ShownProgress


@pytest.mark.parametrize(
    ("total", "is_shown", "expected"),
    [
        (3000, True, "checks: 2,000 of 3,000 images\n"),
        (None, True, "checks: 2,000 images\n"),
        (3000, False, ""),
    ],
)
def test_a_line_for_each_minute_where_there_is_no_terminal(total, is_shown, expected, monkeypatch, capsys):
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with ShownProgress("checks", total, "images", is_shown) as shown:
        shown.add(1999)
        now = progress.LINE_EVERY_S
        shown.add()
        shown.add()
    assert capsys.readouterr().err == expected
