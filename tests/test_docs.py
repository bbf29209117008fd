"""The documentation: every setting that it names exists, its examples run, the site builds strictly."""

import json
import os
import re
import runpy
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from accelerate.state import AcceleratorState
from PIL import Image
from places import ROOT

from toolkit.data.splits import open_splits
from toolkit.data.table import Category
from toolkit.index import DETECTORS
from toolkit.models import build_detector, options_class
from toolkit.run.open_run import load_script
from toolkit.run.settings_file import GROUPS

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
PAGES += [*sorted(ROOT.glob("configs/**/*.md")), *sorted(ROOT.glob("notebooks/*.ipynb"))]
HOOKS = load_script(ROOT / "docs" / "site_hooks.py", "site_hooks")


def settings_page() -> set[str]:
    return set(re.findall(r"^\| `(\w+\.\w+)` \|", HOOKS.settings_page(), re.MULTILINE))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_setting_that_a_page_names_is_one(path):
    named = re.findall(rf"--((?:model|{'|'.join(GROUPS)})\.\w+)", path.read_text())
    assert set(named) <= settings_page()


def test_the_page_of_settings_has_every_key_of_the_dataclasses():
    expected = {f"model.{field.name}" for name in DETECTORS for field in fields(options_class(name))}
    expected |= {f"{group}.{field.name}" for group, kind in GROUPS.items() for field in fields(kind)}
    assert settings_page() == expected


def test_the_loss_of_the_first_page_is_the_one_of_the_recipes():
    """Which a test applies, trains and resumes; the lines around it are those of the script."""
    lines = re.search(r"```diff\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1].splitlines()
    recipes = (ROOT / "docs" / "change_the_loop.md").read_text()
    script = (ROOT / "scripts" / "train_detr.py").read_text()
    assert [line for line in lines if line[:1] == "+" and line not in recipes] == []
    kept = [line[1:] for line in lines if line[:1] != "+"]
    assert [line for line in kept if line not in script and line != "@"] == []
    loop = re.search(r"    for window in t.windows.*?(?=    return t.end_epoch)", script, re.DOTALL)[0]
    assert "\n".join(kept).startswith(loop), "the whole loop"


def test_every_figure_of_the_first_page_is_in_the_pages_of_measurements():
    prose = re.sub(r"```.*?```", "", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.S)
    figures = set(re.findall(r"\d+\.\d+", prose.replace("Python 3.11", "").replace("Apache-2.0", "")))
    pages = [(ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in ("results", "benchmarks")]
    measured = set(re.findall(r"\d+\.\d+", "".join(pages)))
    assert len(figures) > 20
    assert figures <= measured


def test_every_page_is_in_the_contents():
    entries = re.findall(r"[\w/]+\.md", yaml.dump(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    written = {path.relative_to(ROOT / "docs").as_posix() for path in ROOT.glob("docs/**/*.md")}
    assert sorted(entries) == sorted(written | set(HOOKS.PAGES.values()) | {"settings.md"})


def test_what_the_dockerfile_names_is_there():
    lines = re.sub(r"\\\n", " ", (ROOT / "Dockerfile").read_text()).splitlines()
    words = [line.split() for line in lines if line and not line.startswith("#")]
    assert words[0][0] == "FROM"
    assert ":" in words[0][1]
    assert {line[0] for line in words} <= {"FROM", "RUN", "WORKDIR", "COPY", "USER", "ENTRYPOINT", "CMD"}
    copied = [name for line in words if line[0] == "COPY" for name in line[1:-1]]
    assert {"pyproject.toml", "toolkit", "scripts", "configs"} <= set(copied)
    assert [name for name in copied if not (ROOT / name).exists()] == []


def test_what_the_workflow_makes_is_a_target():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yaml").read_text())
    runs = [step["run"] for step in workflow["jobs"]["test"]["steps"] if "run" in step]
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    made = [run.split()[1:] for run in runs if run.startswith("make ")]
    assert ["lint", "test"] in made
    assert {word for words in made for word in words} <= targets


# ---- the examples of pages -------------------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The current folder, with what the examples of pages open; the SSD, of random weights, gives each of some boxes a
    score of about 0.5."""
    monkeypatch.chdir(tmp_path)
    sizes = {"strides": [4, -1], "channels": [16, 16], "aspect_ratios": [[2], [2]]}
    detector = build_detector("ssd", backbone="lcnet_035", **sizes, class_names=["circle"])
    for run in ("detr", "faster_rcnn"):
        detector.eval().save_final(tmp_path / "runs" / run, [Category(7, "circle")], {"height": 64, "width": 64})
    Image.new("RGB", (90, 60), "#336699").save("photo.jpg")
    return tmp_path


def examples(page: str) -> str:
    """The Python of a page as one program; blocks with a title become files in the current folder."""
    text = (ROOT / page).read_text()
    program = []
    for kind, title, block in re.findall(r'```(python|yaml)(?: title="([^"]+)")?\n(.*?)```', text, re.DOTALL):
        if title:
            Path(title).write_text(block)
        elif kind == "python":
            program.append(block)
    return "\n".join(program)


def test_the_python_of_the_readme_runs(here, capsys):
    exec(compile(examples("README.md"), "README.md", "exec"), {})
    assert re.match(r"circle 0\.\d\d: -?\d+, -?\d+, -?\d+, -?\d+\n", capsys.readouterr().out)


def test_the_examples_of_the_api_run(here, monkeypatch):
    monkeypatch.setenv("DETECTION_TOOLKIT_CACHE", str(here / "cache"))
    monkeypatch.setattr("toolkit.run.session_end._report", lambda *_, **__: None)
    monkeypatch.syspath_prepend(here)
    values = {}
    try:
        exec(compile(examples("docs/api.md"), "api.md", "exec"), values)
    finally:
        AcceleratorState._reset_state(True)
        for module in ("one_box", "mine"):
            sys.modules.pop(module, None)
    assert "val/bbox_AP" in values["last_row"]
    assert (here / "runs" / "mine" / "checkpoints" / "latest").exists()


def test_the_circuit_boards_become_a_data_set_and_their_publishers_measure_counts(here, monkeypatch, capsys):
    examples("docs/example_circuit_boards.md")
    boards = Path("PCBData", "g")
    boards.mkdir(parents=True)
    for number, split, box in ((0, "trainval", "4 6 20 30 1"), (1, "test", "8 8 12 12 6")):
        Image.new("L", (40, 40), 255).save(boards / f"{number}_test.jpg")
        Image.new("L", (40, 40), number).save(boards / f"{number}_temp.jpg")
        (boards / f"{number}.txt").write_text(f"{box}\n{box}")
        Path(f"PCBData/{split}.txt").write_text(f"g/{number}.jpg g/{number}.txt\n")
    runpy.run_path("deep_pcb.py")
    config = yaml.safe_load((ROOT / "configs" / "ssd" / "deep_pcb.yaml").read_text())["data"]
    train, val = open_splits("train", "val", here, say=print, path=config["path"], cache_dir=here)
    assert train.class_names == ["open", "pin-hole"]
    assert (len(train), len(val)) == (1, 1)
    # beside the pin-hole; it; it, of another class
    found = [([20, 20, 4, 2], 0.9, 2), ([8, 8, 4, 2], 0.8, 2), ([8, 8, 4, 2], 0.7, 1)]
    results = [{"image_id": 1, "category_id": label, "bbox": box, "score": score} for box, score, label in found]
    Path("found.json").write_text(json.dumps(results))
    monkeypatch.setattr(sys, "argv", ["deep_pcb_measure.py", "found.json"])
    runpy.run_path("deep_pcb_measure.py")
    assert "AP 0.2500" in capsys.readouterr().out


@pytest.mark.slow
def test_site_builds_strictly_and_links_lead_somewhere(tmp_path):
    pytest.importorskip("mkdocs", reason="the extra docs is not installed")
    site = tmp_path / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}  # as in the Makefile: advice of the theme
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stdout + done.stderr
    assert "run.max_minutes" in (site / "settings.html").read_text()
    assert (site / "files" / "scripts" / "train_detr.py.txt").exists()
