"""The recipes of docs/change_the_loop.md, applied to the scripts as they are; and changes that leave something out.

    python -m pytest tests/scripts/test_change_the_loop.py          # each recipe trains two steps; each mistake is told
    python -m pytest tests/scripts/test_change_the_loop.py -m slow  # killed and resumed, two processes, a NaN
"""

import json
import math
import re
from dataclasses import replace

import pytest
from launching import (
    REPORT,
    ROOT,
    Script,
    all_rows,
    assert_same_run,
    nonfinite,
    small_settings,
    training_rows,
)

from toolkit.data.shapes import make_shapes

PAGE = (ROOT / "docs" / "change_the_loop.md").read_text()
RECIPES = dict(re.findall(r"^## (\d+\. .*?)\n.*?^```diff\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
# What a run with the recipe has that others have not: values of its rows, or a file.
SHOWN = {1: "train/loss_confidence", 2: "train/best_score", 3: "train/loss_distillation", 4: "train/loss_critic",
         6: "train/loss_slope", 10: "train/loss_consistency", 13: "train/loss_entropy", 15: "seen/000000.jpg"}  # fmt: skip
DETR = Script("train_detr", slow_end=(REPORT,))
RESNET = ["--model.backbone", "resnet10t"]  # whose activations have second derivatives


def changed_text(text: str, hunks: list[tuple[str, str]]) -> str:
    """The text with every (old, new); each old one is there once, and none overlaps another."""
    places = []
    for old, new in hunks:
        assert text.count(old) == 1, f"found {text.count(old)} times:\n{old}"
        places.append((text.index(old), old, new))
    end = len(text)
    for start, old, new in sorted(places, reverse=True):
        assert start + len(old) <= end, f"overlaps what comes after it:\n{old}"
        text, end = text[:start] + new + text[start + len(old) :], start
    return text


def hunks_of(diff: str) -> tuple[str, list[tuple[str, str]]]:
    """(name of the script, its hunks) of a diff as the page has it."""
    first, _, rest = diff.partition("\n")
    hunks = [part.splitlines(keepends=True) for part in rest.split("@@\n")]
    assert all(line[0] in " +-\n" for lines in hunks for line in lines)
    sides = [["".join(line[1:] or "\n" for line in lines if line[0] in kept) for kept in (" -\n", " +\n")]
             for lines in hunks]  # fmt: skip
    return re.fullmatch(r"--- scripts/(\w+)\.py", first)[1], [(old, new) for old, new in sides]


@pytest.fixture(scope="module")
def changed(tmp_path_factory):
    """`changed(name, hunks, script)`: the script with these changes, as a file of its own."""

    def write(name: str, hunks, script: str = DETR.name) -> Script:
        base = replace(DETR, name=script)
        path = tmp_path_factory.mktemp("changed") / f"{name}.py"
        path.write_text(changed_text(base.path.read_text(), hunks))
        return replace(base, changed=path)

    return write


def small(script: Script, data, *given) -> list[str]:
    return small_settings(script, data, [*(RESNET if script.name == "train_yolov3" else []), *given])


@pytest.fixture(scope="module")
def surroundings(server, data):
    """What recipes find in the folder they are run from: a second data set, and a run that teaches."""
    make_shapes(server.folder / "second", train_images=10, val_images=2, image_size=64, seed=7)
    args = ["--run.max_steps", 1, "--run.output_dir", server.folder / "runs", "--run.name", "teacher"]
    server.run(DETR, small(DETR, data, *args)).ok()


@pytest.fixture(params=RECIPES, ids=lambda title: title.replace(" ", "_"))
def recipe(request, changed, surroundings) -> tuple[int, Script]:
    name, hunks = hunks_of(RECIPES[request.param])
    number = int(request.param.partition(".")[0])
    return number, changed(f"recipe{number}", hunks, name)


def test_the_page_has_every_recipe():
    assert [int(title.partition(".")[0]) for title in RECIPES] == list(range(1, 16))
    assert len(re.findall(r"^## \d", PAGE, re.MULTILINE)) == PAGE.count("```diff") == 15
    longest = max(len(line) - 1 for diff in RECIPES.values() for line in diff.splitlines())
    assert longest <= 120


def test_recipe_trains(recipe, server, data, tmp_path):
    number, script = recipe
    args = small(script, data, "--run.output_dir", tmp_path, "--run.max_steps", 2, "--data.batch_size_per_device", 2)
    folder = server.run(script, args).ok().folder
    rows = training_rows(folder)
    assert [row["step"] for row in rows] == [1, 2]
    if "/0" in SHOWN.get(number, ""):
        assert (folder / SHOWN[number]).stat().st_size > 1000
    elif number in SHOWN:
        assert all(math.isfinite(row[SHOWN[number]]) for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_recipe_goes_on_to_the_bit(recipe, processes, server, data, tmp_path):
    """Killed while its second checkpoint is written, and resumed."""
    _, script = recipe
    args = small(script, data, "--run.output_dir", tmp_path, "--run.save_every", 2, "--run.eval_every", 0,
                 "--run.resume", "latest", "--data.batch_size_per_device", 4 // processes,
                 "--optim.accumulation_steps", 2)  # fmt: skip
    reference = server.run(script, [*args, "--run.name", "reference"], processes).ok().folder
    assert [row["step"] for row in training_rows(reference)] == [1, 2, 3, 4, 5, 6]
    args = [*args, "--run.name", "killed"]
    fault = {"signal": "SIGKILL", "at": "toolkit.runs.checkpoint:_seal", "call": 2, "rank": 0}
    assert server.run(script, args, processes, [fault]).code == -9
    resumed = server.run(script, args, processes).ok()
    assert "step_000002" in resumed.text
    assert_same_run(resumed.folder, reference)


@pytest.mark.slow
def test_recipe_passes_a_nan_over(recipe, server, data, tmp_path):
    """An image of the third window makes a NaN: the report blames the forward, and the replay meets it again."""
    _, script = recipe
    args = small(script, data, "--run.output_dir", tmp_path, "--run.on_nonfinite", "skip", "--run.max_steps", 4)
    fault = {"nan": "activation", "window": 3}
    ended = server.run(script, args, 1, [fault]).ok()
    assert [row["step"] for row in training_rows(ended.folder)] == [1, 2, 3, 4]
    assert ended.text.count("goes on from step 2") == 1
    for path in ended.folder.glob("checkpoints/step_*"):
        assert not nonfinite(path)
    check_replay(server, ended.folder, [fault])


def check_replay(server, folder, faults) -> None:
    """The one report of a run blames its window, and scripts/replay.py sees the same."""
    (report,) = folder.glob("nan/*/*/report.json")
    found = json.loads(report.read_text())
    assert found["where"] == "module" and "backbone" in found["first_nonfinite_module"], found["where"]
    planted = [{"nan": fault["nan"], "ids": found["image_ids"][-1]} for fault in faults]
    again = server.run(ROOT / "scripts" / "replay.py", [report.parent], faults=planted)
    assert again.code == 0 and "changed since" not in again.text, again.text
