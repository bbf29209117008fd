"""The recipes of docs/change_the_loop.md, applied to the scripts as they are; and changes that leave something out."""

import json
import math
import re
from dataclasses import replace

import pytest
from launching import (
    SCRIPTS,
    Script,
    assert_same_run,
    flat,
    kill,
    nonfinite,
    pairs,
    small_settings,
    training_rows,
)
from places import ROOT
from plain_training import BACKWARD, CLIP, END

from toolkit.tools import detect
from toolkit.tools.shapes import make_shapes

PAGE = (ROOT / "docs" / "change_the_loop.md").read_text()
RECIPES = dict(re.findall(r"^## (\d+\. .*?)\n.*?^```diff\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
# What the rows of a run with a recipe have that others have not.
SHOWN = {
    1: "train/loss_confidence",
    2: "train/best_score",
    3: "train/loss_distillation",
    4: "train/loss_critic",
    6: "train/loss_slope",
    10: "train/loss_consistency",
    13: "train/loss_entropy",
}
DETR = SCRIPTS[0]
REPLAY = ROOT / "scripts" / "replay.py"
NAN = {"nan": "activation"}


def hunks_of(diff: str) -> tuple[str, list[tuple[str, str]]]:
    """Return the name of the script and the (old, new) texts of a diff as the page has it."""
    first, _, rest = diff.partition("\n")
    hunks = []
    for part in rest.split("@@\n"):
        texts = {" ": "", "-": "", "+": ""}
        for line in part.splitlines(keepends=True):
            kind = line[0].strip() or " "
            for side in "-+" if kind == " " else kind:
                texts[side] += line[1:] or "\n"
        hunks.append((texts["-"], texts["+"]))
    return re.fullmatch(r"--- scripts/(\w+)\.py", first)[1], hunks


@pytest.fixture(scope="module")
def changed(tmp_path_factory):
    """`changed(name, *hunks, script)`: the script with these (old, new) texts, as a file of its own."""

    def write(name: str, *hunks: tuple[str, str], script: str = DETR.name) -> Script:
        base = replace(DETR, name=script)
        text = base.path.read_text()
        for number, (old, _) in enumerate(hunks):
            assert text.count(old) == 1, f"found {text.count(old)} times:\n{old}"
            text = text.replace(old, f"<{number}>")  # so that no hunk changes what another one has written
        for number, (_, new) in enumerate(hunks):
            text = text.replace(f"<{number}>", new)
        path = tmp_path_factory.mktemp("changed") / f"{name}.py"
        path.write_text(text)
        return replace(base, changed=path)

    return write


def small(script: Script, data, *given) -> list[str]:
    resnet = ["--model.backbone", "test_resnet"] if script.name == "train_yolov3" else []  # has second derivatives
    return small_settings(script, data, [*resnet, *given])


@pytest.fixture
def run_mine(server, data, tmp_path):
    """`run_mine(script, *settings, ...)`: a run of train_detr as it was changed."""

    def run(script: Script, *given, **options):
        return server.run(
            script,
            small(
                DETR,
                data,
                "--run.output_dir",
                tmp_path,
                *given,
            ),
            **options,
        )

    return run


@pytest.fixture(scope="module")
def surroundings(server, data):
    """What recipes find in the folder they are run from: a second data set, and a run that teaches."""
    make_shapes(
        server.folder / "second",
        train_images=10,
        val_images=2,
        image_size=64,
        seed=7,
    )
    args = ["--run.max_steps", 1, "--run.output_dir", server.folder / "runs", "--run.name", "teacher"]
    server.run(DETR, small(DETR, data, *args)).ok()


@pytest.fixture(params=RECIPES, ids=lambda title: title.replace(" ", "_"))
def recipe(request, changed, surroundings) -> tuple[int, Script]:
    name, hunks = hunks_of(RECIPES[request.param])
    number = int(request.param.partition(".")[0])
    return number, changed(f"recipe{number}", *hunks, script=name)


def test_the_page_has_every_recipe():
    assert [int(title.partition(".")[0]) for title in RECIPES] == list(range(1, 16))
    assert len(re.findall(r"^## \d", PAGE, re.MULTILINE)) == PAGE.count("```diff") == 15
    assert max(len(line) - 1 for diff in RECIPES.values() for line in diff.splitlines()) <= 120


def test_recipe_trains(recipe, server, data, tmp_path):
    number, script = recipe
    args = small(script, data, "--run.output_dir", tmp_path, "--run.max_steps", 2, "--data.batch_size_per_device", 2)
    folder = server.run(script, args).ok().folder
    rows = training_rows(folder)
    assert [row["step"] for row in rows] == [1, 2]
    if number in SHOWN:
        assert all(math.isfinite(row[SHOWN[number]]) for row in rows)
    if number == 15:
        assert (folder / "seen" / "000000.jpg").stat().st_size > 1000


GOES_ON = """
    --run.save_every 2 --run.eval_every 0 --run.resume latest --run.on_nonfinite skip --run.epochs 3 --run.max_steps 4
    --data.max_train_images 9 --data.batch_size_per_device 2
"""


@pytest.mark.slow
def test_recipe_goes_on_to_the_bit(recipe, server, data, tmp_path):
    """On two processes an image of the third window makes a NaN, which is passed over; killed while its second
    checkpoint is written and resumed before that window, the run is the uninterrupted one."""
    _, script = recipe
    args = small(script, data, "--run.output_dir", tmp_path, *GOES_ON.split())
    broken = NAN | {"window": 3, "rank": 1}
    reference = server.run(
        script,
        [*args, "--run.name", "reference"],
        2,
        [broken],
    ).ok()
    assert [row["step"] for row in training_rows(reference.folder)] == [1, 2, 3, 4]
    assert reference.text.count("goes on from step 2 ") == 1
    assert not nonfinite(reference.folder / "checkpoints" / "latest")
    args = [*args, "--run.name", "killed"]
    fault = kill(2, "open */.tmp-step_*/MANIFEST.json")
    assert server.run(script, args, 2, [broken, fault]).code == -9
    resumed = server.run(script, args, 2, [broken | {"window": 1}]).ok()
    assert "step_000002" in resumed.text
    assert_same_run(resumed.folder, reference.folder)
    check_replay(server, reference.folder)


def check_replay(server, folder) -> None:
    """The one report of a run blames its window, and scripts/replay.py sees the same in the changed loop."""
    [path] = folder.glob("nan/*/*/report.json")
    report = json.loads(path.read_text())
    assert report["where"] == "module"
    assert "backbone" in report["first_nonfinite_module"]
    planted = NAN | {"ids": report["image_ids"][-1]}
    again = server.run(REPLAY, [path.parent, "--trust"], faults=[planted])
    assert "changed since" not in again.ok().text


def test_calls_left_out_end_a_run_with_a_sentence_for_each(changed, run_mine):
    """Each of them is tested in tests/step/test_loop_check.py."""
    ended = run_mine(changed("mine", (BACKWARD, ""), (CLIP, "")), "--run.max_steps", 3)
    assert ended.code == 2, ended.text
    assert "Traceback" not in ended.text
    assert "`window.backward(weighted, metrics)` was not done" in ended.text
    assert "`window.clip(t.max_norm)` was not done" in ended.text


def test_a_term_in_backward_alone_is_replayed(changed, run_mine, server):
    breaks = '            weighted.total = weighted.total * (float("nan") if t.step == 2 else 1)\n'
    ended = run_mine(changed("mine", (BACKWARD, breaks + BACKWARD)), "--run.max_steps", 4)
    assert ended.code == 3, ended.text
    [report] = ended.folder.glob("nan/*/rank0")
    assert "not reproduced" not in server.run(REPLAY, [report, "--trust"]).ok().text


FREEZES = """        for name, parameter in t.detector.named_parameters() if t.step == 1 else ():
            parameter.requires_grad_("backbone" not in name)
"""
LONGER = ["--run.resume", "latest", "--run.resume_schedule", "new", "--run.max_steps", 3]


def test_what_the_loop_has_frozen_stays_frozen(changed, run_mine):
    script = changed("mine", (END, END + FREEZES))
    run_mine(script, "--run.max_steps", 2).ok()
    assert "parameters that the loop had frozen stay frozen, such as" in run_mine(script, *LONGER).ok().text


def test_a_copy_trains_resumes_and_is_found(server, data, tmp_path):
    """`detect copy`, started with the configuration beside it."""
    assert detect.main(["copy", "train_detr", str(tmp_path / "mine.py")]) == 0
    script = replace(DETR, changed=tmp_path / "mine.py")
    folder = tmp_path / "mine"
    given = pairs(small(DETR, data, "--run.output_dir", tmp_path, "--run.max_steps", 2, "--run.on_nonfinite", "skip"))
    args = flat({key: value for key, value in given.items() if key not in ("--config", "--run.name")})
    server.run(script, args, faults=[NAN | {"window": 2}]).ok()
    server.run(script, [*args, *LONGER]).ok()
    assert [row["step"] for row in training_rows(folder)] == [1, 2, 3]
    image = next((data / "val").glob("*.jpg"))
    for name, given in (("evaluate", [folder]), ("predict", [folder, image, "--out", tmp_path / "out"])):
        server.run(ROOT / "scripts" / f"{name}.py", given).ok()
    check_replay(server, folder)
