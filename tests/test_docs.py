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

DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(DOCS.glob("**/*.md")),
    *sorted(ROOT.glob("configs/**/*.md")),
    *sorted(ROOT.glob("notebooks/*.ipynb")),
]
HOOKS = load_script(DOCS / "site_hooks.py", "site_hooks")
NUMBER = r"\d+\.\d+"


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def settings_page() -> set[str]:
    keys = re.findall(r"^\| `(\w+\.\w+)` \|", HOOKS.settings_page(), re.MULTILINE)
    return set(keys)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_setting_that_a_page_names_is_one(path):
    groups = "|".join(GROUPS)
    named = re.findall(rf"--((?:model|{groups})\.\w+)", path.read_text())
    assert set(named) <= settings_page()


def test_the_page_of_settings_has_every_key_of_the_dataclasses():
    expected = set()
    for name in DETECTORS:
        expected |= {f"model.{field.name}" for field in fields(options_class(name))}
    for group, kind in GROUPS.items():
        expected |= {f"{group}.{field.name}" for field in fields(kind)}
    assert settings_page() == expected


def test_the_loss_of_the_first_page_is_the_one_of_the_recipes():
    """Which a test applies, trains and resumes; the lines around it are those of the script."""
    (diff,) = re.findall(r"```diff\n(.*?)```", text_of("README.md"), re.DOTALL)
    recipes = text_of("docs/change_the_loop.md")
    script = text_of("scripts/train_detr.py")
    kept = []
    for line in diff.splitlines():
        if line.startswith("+"):
            assert line in recipes
        elif line != "@@":
            assert line[1:] in script
            kept.append(line[1:])
    (loop,) = re.findall(r"    for window in t.windows.*?(?=    return t.end_epoch)", script, re.DOTALL)
    assert "\n".join(kept).startswith(loop), "the whole loop"


def test_every_figure_of_the_first_page_is_in_the_pages_of_measurements():
    prose = re.sub(r"```.*?```", "", text_of("README.md"), flags=re.DOTALL)
    for version in ("Python 3.11", "Apache-2.0"):
        prose = prose.replace(version, "")
    figures = set(re.findall(NUMBER, prose))
    assert len(figures) > 20
    measured = re.findall(NUMBER, text_of("docs/results.md") + text_of("docs/benchmarks.md"))
    assert figures <= set(measured)


def test_every_page_is_in_the_contents():
    contents = yaml.safe_load(text_of("mkdocs.yml"))["nav"]
    entries = re.findall(r"[\w/]+\.md", yaml.dump(contents))
    pages = {"settings.md", *HOOKS.PAGES.values()}
    for path in DOCS.glob("**/*.md"):
        pages.add(path.relative_to(DOCS).as_posix())
    assert sorted(entries) == sorted(pages)


INSTRUCTIONS = {
    "FROM",
    "RUN",
    "WORKDIR",
    "COPY",
    "USER",
    "ENTRYPOINT",
    "CMD",
}


def test_what_the_dockerfile_names_is_there():
    text = text_of("Dockerfile").replace("\\\n", " ")
    copied = set()
    names = []
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        name, *words = line.split()
        names.append(name)
        if name == "FROM":
            assert ":" in words[0]
        if name == "COPY":
            copied.update(words[:-1])
    assert names[0] == "FROM"
    assert set(names) <= INSTRUCTIONS
    assert {"pyproject.toml", "toolkit", "scripts", "configs"} <= copied
    for name in copied:
        assert (ROOT / name).exists(), name


def test_what_the_workflow_makes_is_a_target():
    workflow = yaml.safe_load(text_of(".github/workflows/test.yaml"))
    targets = re.findall(r"^([\w-]+):", text_of("Makefile"), re.MULTILINE)
    made = []
    for step in workflow["jobs"]["test"]["steps"]:
        command, *words = step.get("run", "-").split()
        if command == "make":
            made.append(words)
            assert set(words) <= set(targets)
    assert ["lint", "test"] in made


# ---- the examples of pages -------------------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The current folder, with what the examples of pages open; the SSD, of random weights, gives each of some boxes a
    score of about 0.5."""
    monkeypatch.chdir(tmp_path)
    detector = build_detector(
        "ssd",
        backbone="lcnet_035",
        strides=[4, -1],
        channels=[16, 16],
        aspect_ratios=[[2], [2]],
        class_names=["circle"],
    )
    detector.eval()
    size = {"height": 64, "width": 64}
    for run in ("detr", "faster_rcnn"):
        folder = tmp_path / "runs" / run
        detector.save_final(folder, [Category(7, "circle")], size)
    Image.new("RGB", (90, 60), "#336699").save("photo.jpg")
    return tmp_path


def examples(page: str) -> str:
    """The Python of a page as one program; blocks with a title become files in the current folder."""
    pattern = r'```(python|yaml)(?: title="([^"]+)")?\n(.*?)```'
    program = []
    for kind, title, block in re.findall(pattern, text_of(page), re.DOTALL):
        if title:
            Path(title).write_text(block)
        elif kind == "python":
            program.append(block)
    return "\n".join(program)


def run_examples(page: str) -> dict:
    """Run them; return the values of their names."""
    values = {}
    program = compile(examples(page), page, "exec")
    exec(program, values)
    return values


def test_the_python_of_the_readme_runs(here, capsys):
    run_examples("README.md")
    printed = capsys.readouterr().out
    assert re.match(r"circle 0\.\d\d: -?\d+, -?\d+, -?\d+, -?\d+\n", printed)


def test_the_examples_of_the_api_run(here, monkeypatch):
    monkeypatch.setenv("DETECTION_TOOLKIT_CACHE", str(here / "cache"))
    monkeypatch.setattr("toolkit.run.session_end._report", lambda *_, **__: None)
    monkeypatch.syspath_prepend(here)
    try:
        values = run_examples("docs/api.md")
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
    samples = ((0, "trainval", "4 6 20 30 1"), (1, "test", "8 8 12 12 6"))
    for number, split, box in samples:
        Image.new("L", (40, 40), 255).save(boards / f"{number}_test.jpg")
        Image.new("L", (40, 40), number).save(boards / f"{number}_temp.jpg")
        (boards / f"{number}.txt").write_text(f"{box}\n{box}")
        Path(f"PCBData/{split}.txt").write_text(f"g/{number}.jpg g/{number}.txt\n")
    runpy.run_path("deep_pcb.py")
    config = yaml.safe_load(text_of("configs/ssd/deep_pcb.yaml"))
    path = config["data"]["path"]
    train, val = open_splits("train", "val", here, say=print, path=path, cache_dir=here)
    assert train.class_names == ["open", "pin-hole"]
    assert len(train) == 1
    assert len(val) == 1
    pin_hole = {
        "image_id": 1,
        "category_id": 2,
        "bbox": [8, 8, 4, 2],
        "score": 0.8,
    }
    beside_it = pin_hole | {"bbox": [20, 20, 4, 2], "score": 0.9}
    of_another_class = pin_hole | {"category_id": 1, "score": 0.7}
    results = [beside_it, pin_hole, of_another_class]
    Path("found.json").write_text(json.dumps(results))
    monkeypatch.setattr(sys, "argv", ["deep_pcb_measure.py", "found.json"])
    runpy.run_path("deep_pcb_measure.py")
    assert "AP 0.2500" in capsys.readouterr().out


@pytest.mark.slow
def test_site_builds_strictly_and_links_lead_somewhere(tmp_path):
    pytest.importorskip("mkdocs", reason="the extra docs is not installed")
    site = tmp_path / "site"
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},  # as in the Makefile: advice of the theme
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stdout + done.stderr
    settings = (site / "settings.html").read_text()
    assert "run.max_minutes" in settings
    assert (site / "files" / "scripts" / "train_detr.py.txt").exists()
