"""The last lines of a run say what to do next."""

from types import SimpleNamespace

import pytest
from places import ROOT

from toolkit.run.session_end import last_lines


@pytest.fixture
def lines_of(tmp_path, monkeypatch):
    """A function that returns the last lines of a run in `my runs/a`, by architecture and mode."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "my runs" / "a"

    def lines(architecture: str = "ssd", mode: str = "", trained: bool = True, has_report: bool = True) -> list[str]:
        (folder / "report").mkdir(parents=True, exist_ok=True)
        if has_report:
            (folder / "report" / "index.html").touch()
        detector = SimpleNamespace(options={"architecture": architecture}, mode=mode)
        return last_lines(SimpleNamespace(folder=folder, detector=detector), trained)

    return lines


def test_report_weights_and_the_command_that_predicts(lines_of):
    assert lines_of() == [
        "report: my runs/a/report/index.html",
        "weights: my runs/a/final",
        "predict: detect predict 'my runs/a' photo.jpg --out found",
    ]


def test_in_the_project_it_is_the_script(lines_of, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert " python scripts/predict.py " in lines_of()[-1]


@pytest.mark.parametrize(
    ("options", "flags"),
    [
        ({"architecture": "mine:Detector"}, " --trust"),
        ({"mode": "predcls"}, " --boxes photo.json"),
        ({"mode": "sgdet"}, ""),
    ],
)
def test_the_command_has_what_the_detector_needs(lines_of, options, flags):
    assert lines_of(**options)[-1] == f"predict: detect predict 'my runs/a' photo.jpg --out found{flags}"


def test_a_run_that_only_evaluates_has_a_report_alone(lines_of):
    assert lines_of(trained=False) == ["report: my runs/a/report/index.html"]


def test_a_report_that_failed_is_not_named(lines_of):
    assert lines_of(has_report=False)[0] == "weights: my runs/a/final"
