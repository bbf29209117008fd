"""The recipes of docs/change_the_loop.md, applied to the scripts as they are; and changes that leave something out."""

import json
import math
import re
from dataclasses import replace

import pytest
from launching import (
    ROOT,
    SCRIPTS,
    Script,
    all_rows,
    assert_same_run,
    flat,
    kill,
    nonfinite,
    pairs,
    small_settings,
    training_rows,
)

from toolkit.tools import detect
from toolkit.tools.shapes import make_shapes

PAGE = (ROOT / "docs" / "change_the_loop.md").read_text()
RECIPES = dict(re.findall(r"^## (\d+\. .*?)\n.*?^```diff\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
# What a run with the recipe has that others have not: values of its rows, or a file.
SHOWN = {1: "train/loss_confidence", 2: "train/best_score", 3: "train/loss_distillation", 4: "train/loss_critic",
         6: "train/loss_slope", 10: "train/loss_consistency", 13: "train/loss_entropy",
         15: "seen/000000.jpg"}  # fmt: skip
DETR = SCRIPTS[0]
RESNET = ["--model.backbone", "test_resnet"]  # whose activations have second derivatives


def changed_text(text: str, hunks: list[tuple[str, str]]) -> str:
    """The text with every (old, new); each old one is there once, and none overlaps another."""
    spans = []
    for old, new in hunks:
        assert text.count(old) == 1, f"found {text.count(old)} times:\n{old}"
        spans.append((text.index(old), old, new))
    end = len(text)
    for start, old, new in sorted(spans, reverse=True):
        assert start + len(old) <= end, f"overlaps what comes after it:\n{old}"
        text, end = text[:start] + new + text[start + len(old) :], start
    return text


def hunks_of(diff: str) -> tuple[str, list[tuple[str, str]]]:
    """(name of the script, its hunks) of a diff as the page has it."""
    first, _, rest = diff.partition("\n")
    hunks = [part.splitlines(keepends=True) for part in rest.split("@@\n")]
    assert all(line[0] in " +-\n" for lines in hunks for line in lines)
    old, new = (["".join(line[1:] or "\n" for line in lines if line[0] in kept) for lines in hunks]
                for kept in (" -\n", " +\n"))  # fmt: skip
    return re.fullmatch(r"--- scripts/(\w+)\.py", first)[1], list(zip(old, new, strict=True))


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
def test_recipe_goes_on_to_the_bit(recipe, server, data, tmp_path):
    """On two processes an image of the third window makes a NaN, which is passed over; killed while its second
    checkpoint is written and resumed before that window, the run is the uninterrupted one."""
    _, script = recipe
    args = small(script, data, "--run.output_dir", tmp_path, "--run.save_every", 2, "--run.eval_every", 0,
                 "--run.resume", "latest", "--run.on_nonfinite", "skip", "--run.epochs", 3, "--run.max_steps", 4,
                 "--data.max_train_images", 9, "--data.batch_size_per_device", 2)  # fmt: skip
    broken = {"nan": "activation", "window": 3, "rank": 1}
    reference = server.run(script, [*args, "--run.name", "reference"], 2, [broken]).ok()
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
    (path,) = folder.glob("nan/*/*/report.json")
    report = json.loads(path.read_text())
    assert report["where"] == "module" and "backbone" in report["first_nonfinite_module"], report["where"]
    planted = {"nan": "activation", "ids": report["image_ids"][-1]}
    again = server.run(ROOT / "scripts" / "replay.py", [path.parent, "--trust"], faults=[planted])
    assert "changed since" not in again.ok().text

CRITERION = "losses, metrics = t.detector.criterion(outputs, batch.targets, window.denominators)  # in float32\n"
BACKWARD = "            window.backward(weighted, metrics)\n"
REDUCE = "        reduced = window.reduce()  # `reduce_dict`: one collective and one host read for the whole step\n"
ACCEPTS = """        if not t.guard.accepts(window, reduced):  # the NaN guard, on every rank alike: reported and undone
            continue
"""
CLIP = "        window.clip(t.max_norm)\n"
UPDATE = "        t.optimizer.step()\n"
EMA = "        t.ema.update()\n"
METERS = "        t.meters.update(reduced)\n"
EPOCH = "    while not t.finished:\n"
PASSES_OVER = """        if t.step == 1 and not t.extra.get("passed"):
            t.extra["passed"] = True
            continue
"""
OWN_OPTIMIZER = """    import torch
    t.critic = torch.nn.Linear(3, 1)
    t.critic_optimizer = torch.optim.Adam(t.critic.parameters())
"""
ITS_UPDATE = """        t.critic(window.batches[0].images.float().mean((2, 3))).mean().backward()
        t.critic_optimizer.step()
"""
TOLD = {  # change -> (its hunks, exit code, what is said)
    "a window is passed over": ([(ACCEPTS, PASSES_OVER + ACCEPTS)], 0,
                                "step 1: the loop passed over a window without an update"),
    "calls left out before the update": (
        [(BACKWARD, "            t.accelerator.backward(weighted.total)\n"), (ACCEPTS, "")], 2,
        ["`window.backward(weighted, metrics)` was not done", "without it rows, averages",
         'a NaN would reach the weights. Put it back, or say t.without("accepts") in train']),
    "nothing is reduced": ([(REDUCE, "        reduced = {}\n"), (ACCEPTS, "")], 2,
                           "`reduced = window.reduce()` was not done; without it a NaN in a gradient would reach"),
    "meters left out": ([(METERS, "")], 2, "the window is over, and `t.meters.update(reduced)` was not done"),
    "clipping left out": ([(CLIP, "")], 2, "the update comes too early, and `window.clip(t.max_norm)` was not done"),
    "averages left out on purpose": ([(EMA, ""), (EPOCH, '    t.without("ema")\n' + EPOCH)], 0,
                                     "training ended by"),
    "meters left out on purpose": ([(METERS, ""), (EPOCH, '    t.without("meters")\n' + EPOCH)], 0,
                                   "training ended by"),
    "a loss that was not announced": (
        [(CRITERION, CRITERION + " " * 12 + 'losses["loss_mine"] = outputs["logits"].mean()\n')], 2,
        "by t.announce('loss_mine', weight=1.0, divided_by=\"images\") after t = s.training(...)"),
    "an optimizer in no checkpoint": ([(EPOCH, OWN_OPTIMIZER + EPOCH), (METERS, ITS_UPDATE + METERS)], 0,
                                      "in no checkpoint, so that a resumed run differs: Adam of 2 parameters"),
}  # fmt: skip


@pytest.mark.parametrize("name", TOLD, ids=lambda name: name.replace(" ", "_"))
def test_a_change_is_told(name, changed, server, data, tmp_path):
    hunks, code, said = TOLD[name]
    args = small(DETR, data, "--run.output_dir", tmp_path, "--run.max_steps", 3, "--run.save_every", 1)
    ended = server.run(changed("mine", hunks), args)
    assert ended.code == code and "Traceback" not in ended.text, ended.text
    assert all(words in ended.text for words in ([said] if isinstance(said, str) else said)), ended.text


ADDS = """losses["loss_mine"] = outputs["logits"].new_ones(())
            assert images.equal(batch.images.float())
"""
WRITES = """        reduced["mine"] = 3.5
        t.log.note("noted", reduced["grad_norm"])
        t.log.write(t.step + 1, 0, {"written": reduced["grad_norm"]})
"""


def test_what_is_added_is_in_the_rows(changed, server, data, tmp_path):
    """A loss of 1 stays 1 however many micro-batches make a step; images given as floats are not changed."""
    hunks = [
        ("                outputs = t.model(batch.images, batch.sizes, batch.targets)\n",
         "                images = batch.images.float()\n"
         "                outputs = t.model(images, batch.sizes, batch.targets)\n"),
        (CRITERION, CRITERION + " " * 12 + ADDS), (UPDATE, WRITES + UPDATE),
        (EPOCH, '    t.announce("loss_mine", weight=0.5, divided_by="images")\n' + EPOCH),
    ]  # fmt: skip
    args = small(DETR, data, "--run.output_dir", tmp_path, "--run.epochs", 1, "--optim.accumulation_steps", 2)
    folder = server.run(changed("mine", hunks), args).ok().folder
    trained = training_rows(folder)
    assert [row["step"] for row in trained] == [1, 2, 3]  # five micro-batches, the last one of two images
    assert [row["train/loss_mine_unscaled"] for row in trained] == pytest.approx([1.0] * 3)
    assert [row["train/loss_mine"] for row in trained] == pytest.approx([0.5] * 3)
    assert all(row["train/mine"] == 3.5 and row["train/noted"] == row["train/grad_norm"] for row in trained)
    assert sum("written" in row for row in all_rows(folder)) == 3


def test_a_term_in_backward_alone_is_replayed(changed, server, data, tmp_path):
    breaks = '            weighted.total = weighted.total * (float("nan") if t.step == 2 else 1)\n'
    hunks = [(BACKWARD, breaks + BACKWARD)]
    args = small(DETR, data, "--run.output_dir", tmp_path, "--run.max_steps", 4)
    ended = server.run(changed("mine", hunks), args)
    assert ended.code == 3, ended.text
    (report,) = ended.folder.glob("nan/*/rank0")
    assert "not reproduced" not in server.run(ROOT / "scripts" / "replay.py", [report, "--trust"]).ok().text


def test_what_the_loop_has_frozen_stays_frozen(changed, server, data, tmp_path):
    freezes = """        for name, parameter in t.detector.named_parameters() if t.step == 1 else ():
            parameter.requires_grad_("backbone" not in name)
"""
    args = small(DETR, data, "--run.output_dir", tmp_path, "--run.resume", "latest", "--run.max_steps", 2)
    script = changed("mine", [(METERS, METERS + freezes)])
    server.run(script, args).ok()
    resumed = server.run(script, [*args, "--run.resume_schedule", "new", "--run.max_steps", 3]).ok()
    assert "parameters that the loop had frozen stay frozen, such as" in resumed.text


def test_accumulation_by_epoch_ends_with_the_epochs(changed, server, data, tmp_path):
    by_epoch = "    t.model.train()\n    t.plan.accumulation_steps = 1 + t.sampler.epoch\n"
    args = small(DETR, data, "--run.output_dir", tmp_path, "--run.epochs", 3)
    ended = server.run(changed("mine", [("    t.model.train()\n", by_epoch)]), args).ok()
    assert [row["epoch"] for row in training_rows(ended.folder)] == [0] * 5 + [1] * 3 + [2] * 2
    assert "the run ends after step 10" in ended.text


def test_a_copy_trains_resumes_and_is_found(server, data, tmp_path):
    """`detect copy`, started with the configuration beside it."""
    assert detect.main(["copy", "train_detr", str(tmp_path / "mine.py")]) == 0
    script, folder = replace(DETR, changed=tmp_path / "mine.py"), tmp_path / "mine"
    given = small(DETR, data, "--run.output_dir", tmp_path, "--run.max_steps", 2, "--run.on_nonfinite", "skip")
    args = flat({key: value for key, value in pairs(given).items() if key not in ("--config", "--run.name")})
    server.run(script, args, faults=[{"nan": "activation", "window": 2}]).ok()
    server.run(script, [*args, "--run.resume", "latest", "--run.resume_schedule", "new", "--run.max_steps", 3]).ok()
    assert [row["step"] for row in training_rows(folder)] == [1, 2, 3]
    image = next((data / "val").glob("*.jpg"))
    for name, given in (("evaluate", [folder]), ("predict", [folder, image, "--out", tmp_path / "out"])):
        server.run(ROOT / "scripts" / f"{name}.py", given).ok()
    check_replay(server, folder)
