"""The training scripts: options in as few runs as will hold them, what a run leaves, and mistakes of the user.

What only one of them does is in a file of its own beside this one; what happens to a run is in tests/promises.
"""

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from launching import (
    EVALUATION,
    SCRIPTS,
    Result,
    checkpoint_state,
    checkpoint_tensors,
    finish,
    kill,
    nonfinite,
    rows,
    start,
    training_rows,
)
from places import ASSETS, ROOT
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tracked import offline_history, offline_records

from toolkit.data.formats import open_dataset
from toolkit.evaluation.matches import metric_keys
from toolkit.run.status import read_status
from toolkit.tools.report.facts import run_facts
from toolkit.tools.writers import write_folder

BOXES_AND_GRAPHS = [script for script in SCRIPTS if script.name in ("train_detr", "train_sgg")]
DIRTY = ASSETS / "dirty"
LEFT_OUT = (2, 3, 4, 9, 10, 11, 12, 13, 14, 15, 21, 23, 24, 25, 26, 27, 28)  # images of it
OPTIONS = """
--run.precision bf16 --run.tracker tensorboard --run.probe_memory true --run.deterministic true --run.max_steps 4
--run.eval_every '1 epoch' --eval.pictures 4 --data.photometric true --data.group_by_aspect_ratio true
--data.cache_images true --schedule.name cosine --optim.backbone_lr 1e-4 --optim.accumulation_steps 2
--loss.weights '{"loss_giou": "learned", "loss_bbox": [[0, 1.0], [2, 5.0]]}'
"""
# Names of classes of every kind: control characters, markup, formulas, long, of other directions, paths and brackets.
NAMES = [
    "line\nbreak",
    "\x1b[31mred\x1b[0m",
    "nul\x00bell\x07",
    "$x$",
    "<script>alert(1)</script>",
    "**bold** `code` | [link](http://x.y)",
    "x" * 5000,
    "\u05e9\u05dc\u05d5\u05dd",
    "\u202egnp.exe",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467",
    "e" + "\u0301" * 500,
    "\udcff half",
    "\u2028separator",
    "%s %d {0} {name}",
    "../../etc",
    "AP/cat",
]
CONTROLS = {"\x1b", "\x07", "\x08", "\x00", "\u202e", "\u2028"}

# Mistakes: what is given, TMP being the folder of `FILES`, and words of the message; those after the first are of DETR.
FILES = {
    "wrong_key.yaml": "optim: {learning_rate: 1.0e-3}",
    "wrong_type.yaml": "optim: {lr: fast}",
    "torn.yaml": "optim: {lr: [",
    "plain_file": "",
}
MISTAKES = {
    "--config TMP/none.yaml": ["none.yaml"],
    "--config TMP/wrong_key.yaml": ["learning_rate", "wrong_key.yaml"],
    "--config TMP/wrong_type.yaml": ["optim.lr", "fast"],
    "--config TMP/torn.yaml": ["torn.yaml", "line 1"],
    "--optim.learning_rate 1": ["learning_rate"],
    "--data.train TMP/none.json": ["none.json"],
    "--data.train TMP/empty.json": ["empty.json", "`images` is empty"],
    "--data.val TMP/other_classes.json": ["4 classes", "3", "circle"],
    f"--data.image_dir {DIRTY}/images --data.train {DIRTY}/annotations/instances.json": ["image 2)", "image 28)"],
    "--data.batch_size_per_device 64": ["64", "18", "batch_size_per_device"],
    "--data.augment [RandomFlip]": ["RandomFlip"],
    "--data.scales [64,96]": ["data.scales", "one size"],
    "--data.image_size 98": ["98 px", "multiples of 32, such as 96"],
    "--data.image_size [100,64]": ["100 x 64 px", "such as [96, 64]"],
    "--data.image_size [64,64,3]": ["[64, 64, 3] is not a size of", "[height, width]"],
    "--model.architecture detrr": ["model.architecture", "detrr", "rt_detr_v2"],
    "--model.backbone resnet10": ["resnet10", "resnet10t"],
    "--model.pretrained runs/of/nobody": ["model.pretrained runs/of/nobody: no such file or folder"],
    '--loss.weights {"loss_dice":1.0}': ["loss_dice", "loss_bbox"],
    '--loss.weights {"loss_bbox":"high"}': ["loss_bbox", "high"],
    "--optim.compile gcc": ["inductor"],
    '--optim.lr_multipliers {"neck":0.1}': ["optim.lr_multipliers.neck"],
    "--schedule.name multistep": ["schedule.milestones"],
    "--run.eval_every often": ["often", "epochs"],
    "--run.output_dir TMP/plain_file": ["plain_file", "--run.output_dir"],
    "--run.output_dir /proc/runs": ["/proc/runs", "--run.output_dir"],
    f"--run.name {'x' * 300}": ["File name too long", "Give a shorter --run.name"],
    f"--run.resume TMP/{'x' * 300}": ["too long"],
    "--run.resume TMP": ["no usable checkpoint"],
}
OF_EVERY_SCRIPT = "--model.backbone resnet10"


def events_of(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()


# ---- what a run leaves -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def launched(script, settings, tmp_path_factory):
    """The folder and the output of a run under `accelerate launch`, from a folder that knows nothing of the project."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    args = settings(f"{OPTIONS} --run.output_dir runs --run.name launched")
    accelerate = Path(sys.executable).with_name("accelerate")
    code, text = finish(start([accelerate, "launch", "--num_processes", 1, script.path, *args], cwd=elsewhere))
    assert code == 0, text
    return elsewhere / "runs" / "launched", text


def test_run_folder_says_what_was_run(launched):
    folder, text = launched
    assert "processes: 1" in text
    assert "Traceback" not in text
    assert text.count("Training time 0:0") == 1
    assert " s / step)" in text
    assert "predict: detect predict runs/launched photo.jpg --out found" in text
    status = read_status(folder)
    assert (status["state"], status["exit_code"], status["step"]) == ("done", 0, 4)
    assert status["ended_by"] == ["run.max_steps"]
    assert f"{status['reason']}, at step 4" in text
    assert "Finished after 4 steps (run.max_steps)." in (folder / "report" / "README.md").read_text()
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["processes"] == 1
    assert {"torch", "transformers"} <= environment["packages"].keys()
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["run"]["precision"] == "bf16"
    assert config["loss"]["weights"]["loss_bbox"] == [[0, 1.0], [2, 5.0]]
    for name in ("README.md", "curves.png", "ap.png", "pictures/step_000003.png", "pictures/step_000004.png"):
        assert (folder / "report" / name).stat().st_size > 100, name
    assert not [*folder.rglob("*.onnx"), *folder.rglob("*.pt2")], "nobody asked for an export"


def test_rows_and_tensorboard_have_losses_rates_and_times(launched):
    folder, _ = launched
    logged = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    train = [row for row in logged if "train/loss" in row]
    assert [row["step"] for row in train] == [1, 2, 3, 4]
    for row in train:
        assert {"epoch", "time_s", "train/grad_norm", "time/data_s", "time/step_s"} <= row.keys()
        weight = min(1.0 + 2.0 * (row["step"] - 1), 5.0)  # from 1 to 5 over the first two updates
        assert row["train/loss_bbox"] == pytest.approx(weight * row["train/loss_bbox_unscaled"], rel=1e-5)
        assert row["train/lr/backbone"] == pytest.approx(row["train/lr/main"] * 0.1)
    evaluated = [row for row in logged if "val/loss" in row]
    assert [row["step"] for row in evaluated] == [3, 4]
    assert {"val/bbox_AP", "val/ema/bbox_AP", "val/AP/circle", "val/ema/AP/star"} <= evaluated[0].keys()
    latest = folder / "checkpoints" / "latest"
    assert nonfinite(latest) == []
    assert any(name.startswith("loss_weights/") for name in checkpoint_tensors(latest))
    events = events_of(folder)
    sent = {event.step: event.value for event in events.Scalars("train/loss")}
    assert sent == pytest.approx({row["step"]: row["train/loss"] for row in train}, rel=1e-6)
    assert [event.step for event in events.Scalars("val/bbox_AP")] == [3, 4]
    assert events.Tags()["images"]


def test_evaluating_only_gives_the_same_numbers(server, script, settings, launched, tmp_path):
    folder, _ = launched
    resumed = f"--run.resume {folder}/checkpoints/latest --run.eval_only true --run.tracker none"
    ended = server.run(script, settings(f"{OPTIONS} --run.output_dir {tmp_path} {resumed}")).ok()
    (row,) = rows(ended.folder)
    trained = rows(folder)[-1]
    assert row["val/bbox_AP"] == trained["val/bbox_AP"]
    boxes = [key for key in row if "bbox" in key]
    assert {key: row[key] for key in boxes} == {key: trained[key] for key in boxes}


@pytest.mark.every_script
def test_folder_has_all_that_a_person_looks_at(whole):
    assert read_status(whole)["state"] == "done"
    for name in ("README.md", "curves.png", "pictures/step_000004.png"):
        assert (whole / "report" / name).stat().st_size > 100, name
    for row in training_rows(whole):
        losses = [name for name in row if name.startswith("train/loss_") and not name.endswith("_unscaled")]
        assert row["train/loss"] == pytest.approx(sum(row[name] for name in losses), rel=1e-4)
        assert all(math.isfinite(row[f"{name}_unscaled"]) for name in losses)
    assert {"val/loss", "val/ema/loss"} <= rows(whole)[-1].keys()


@pytest.mark.slow
def test_trackers_have_every_step_after_a_kill(server, script, settings, tmp_path):
    """Killed, stopped in an evaluation, ended, and started once more; tests/tools/trackers has each tracker alone."""
    saved = "--run.resume latest --run.save_every 2 --run.eval_every 2 --run.epochs 3 --data.max_train_images 8"
    tracked = "--run.tracker '[wandb, tensorboard]' --eval.pictures 8"
    args = settings(f"--run.output_dir {tmp_path} {saved} {tracked}")
    server.run(script, args, 1, [kill(4)]).killed()
    assert server.run(script, args, 1, [{"signal": "SIGTERM", "at": EVALUATION, "call": 3}]).code == 85
    ended = server.run(script, args, whole=True).ok()
    assert "switched off" not in ended.text
    assert "failed" not in ended.text
    logged = {row["step"]: row["train/loss"] for row in training_rows(ended.folder)}
    assert list(logged) == [1, 2, 3, 4, 5, 6]
    history = offline_history(ended.folder)
    records = offline_records(ended.folder)
    server.run(script, args).ok()
    assert offline_history(ended.folder) == history, "a finished run sends nothing more"
    assert len({run_id for run_id, _, _ in history}) == 1
    trained = [(step, values["train/loss"]) for _, step, values in history if "train/loss" in values]
    assert [step for step, _ in trained][-6:] == list(logged), "all of them after the kill, without a network"
    assert all(loss == pytest.approx(logged[step]) for step, loss in trained)
    evaluated = {row["step"]: row["val/bbox_AP"] for row in rows(ended.folder) if "val/bbox_AP" in row}
    assert list(evaluated) == [2, 4, 6]
    assert len(records["boxes"][6]) == 8
    assert records["summary"]["best/bbox_AP"] == pytest.approx(max(evaluated.values()))
    (best,) = records["artifacts"]["model"]
    assert f"step-{checkpoint_state(ended.folder / 'checkpoints' / 'best')['step']}" in best["aliases"]
    events = events_of(ended.folder)
    assert {event.step: event.value for event in events.Scalars("train/loss")} == pytest.approx(logged, rel=1e-6)
    assert events.Images("val/predictions")


@pytest.mark.slow
def test_trials_of_a_wandb_agent_have_folders_of_their_own(server, script, settings, tmp_path):
    args = settings(f"--run.output_dir {tmp_path} --run.tracker wandb --run.max_steps 1 --run.epochs 1")
    for trial in ("first", "second"):  # by one command, with what the agent sets
        text = server.run(script, args, env={"WANDB_SWEEP_ID": "sweep", "WANDB_RUN_ID": trial}).text
        assert "switched off" not in text, text
        assert "exists already" not in text, text
        assert {run_id for run_id, _, _ in offline_history(tmp_path / f"run-{trial}")} == {trial}


def go_on(server, script, args, folder: Path) -> Result:
    """Go on with the settings that the report of a run advises."""
    advised = run_facts(folder).go_on.partition("config.yaml ")[2]
    return server.run(script, [*args, *advised.split()]).ok()


def test_minutes_become_steps_once(server, script, settings, tmp_path):
    args = settings(f"--run.output_dir {tmp_path} --run.max_minutes 0.02 --run.epochs 1000 --run.eval_every 0")
    ended = server.run(script, args).ok()
    assert ended.status["ended_by"] == ["run.max_minutes"]
    step = ended.trained[-1]
    assert f"planned length: {step} steps" in ended.text
    latest = ended.folder / "checkpoints" / "latest"
    plan = checkpoint_state(latest)["parts"]["plan"]
    assert plan["total_steps"] == plan["budget"]["total_steps"] == step
    assert "--run.max_minutes 0.04" in run_facts(ended.folder).go_on
    extended = go_on(server, script, args, ended.folder)
    assert extended.status["ended_by"] == ["run.max_minutes"], extended.text
    assert extended.trained[-1] > step + 1
    budget = checkpoint_state(latest)["parts"]["plan"]["budget"]
    assert budget["begun_steps"] == step
    assert budget["begun_s"] == plan["budget"]["elapsed_s"] < budget["elapsed_s"]


def test_early_stopping_ends_a_run_that_does_not_improve(server, script, settings, tmp_path):
    never_better = "--run.eval_every 1 --run.epochs 1000 --optim.lr 0 --model.freeze norms"
    patience = "--eval.metric_for_best ema/bbox_AP --eval.early_stopping_patience 2"
    args = settings(f"--run.output_dir {tmp_path} {never_better} {patience}")
    ended = server.run(script, args).ok()
    step = ended.status["step"]
    assert step <= 5
    assert ended.status["ended_by"] == ["eval.early_stopping_patience"]
    assert f"{ended.status['reason']}, at step {step}" in ended.text
    again = server.run(script, [*args, "--run.resume", "latest", "--run.eval_only", "true"]).ok()
    assert again.status["ended_by"] == ["eval.early_stopping_patience"], "an evaluation alone ended nothing"
    assert "--eval.early_stopping_patience 4" in run_facts(ended.folder).go_on
    assert go_on(server, script, args, ended.folder).status["step"] == step + 2


# ---- data ------------------------------------------------------------------------------------------------------------


def test_losses_are_the_same_from_every_form(server, script, settings, data, tmp_path):
    for split in ("train", "val"):
        table = open_dataset(split, path=data, cache_dir=tmp_path / "cache")
        write_folder(table, tmp_path / "voc", split, "voc")
        write_folder(table, tmp_path / "yolo", split, "yolo")
    losses = []
    for title, path in (("COCO", data), ("Pascal VOC", tmp_path / "voc"), ("YOLO", tmp_path / "yolo")):
        short = f"--run.output_dir {tmp_path} --run.name {path.name}_run --run.epochs 1 --run.eval_every 0"
        form = f"--data.path {path} --data.train train --data.val val --data.format shapes"
        run = server.run(script, settings(f"{short} {form}")).ok()
        assert title in run.text
        losses.append([row["train/loss"] for row in training_rows(run.folder)])
    assert len(losses[0]) == 5
    assert losses[0] == losses[1] == losses[2]


@pytest.mark.parametrize("script", BOXES_AND_GRAPHS, indirect=True, ids=lambda script: script.name)
@pytest.mark.every_script("slow")
def test_classes_have_names_of_every_kind(server, script, settings, data, tmp_path):
    """Trained, evaluated, drawn and tracked; no control character reaches the console or a key."""
    (tmp_path / "annotations").mkdir()
    for split in ("train", "val"):
        document = json.loads((data / "annotations" / f"{split}.json").read_text())
        document["categories"] = [{"id": id, "name": name} for id, name in enumerate(NAMES, 1)]
        for predicate, name in zip(document["rel_categories"], NAMES, strict=False):
            predicate["name"] = name
        (tmp_path / "annotations" / f"{split}.json").write_text(json.dumps(document))
        (tmp_path / split).symlink_to(data / split)
    files = f"--data.train {tmp_path}/annotations/train.json --data.val {tmp_path}/annotations/val.json"
    shown = "--eval.pictures 2 --run.tracker '[tensorboard, wandb]' --run.max_steps 1 --run.epochs 1"
    ended = server.run(script, settings(f"--run.output_dir {tmp_path} {files} {shown}")).ok()
    assert "switched off" not in ended.text
    printed = "".join(line for line in ended.text.splitlines(keepends=True) if "wandb" not in line)  # it has colours
    assert "Traceback" not in printed
    assert not CONTROLS & set(printed)
    assert len(list((ended.folder / "report").glob("pictures/*.png"))) == 1
    evaluated = next(row for row in rows(ended.folder) if "val/loss" in row)
    assert script.name == "train_sgg" or f"val/AP/{metric_keys(NAMES)[0]}" in evaluated
    assert all(key.isprintable() or "\u200d" in key for key in evaluated)


@pytest.mark.every_script("slow")
def test_images_need_not_be_square(server, script, settings, data, tmp_path):
    """Trained, evaluated again from the folder alone, and predicted on, in tiles of the aspect of the images too."""
    sizes = "--data.image_size '[96, 64]' --data.multi_scale '[[96, 64], [128, 96]]'"
    ended = server.run(script, settings(f"--run.output_dir {tmp_path} --run.max_steps 2 --run.eval_every 0 {sizes}"))
    folder = ended.ok().folder
    assert yaml.safe_load((folder / "config.yaml").read_text())["data"]["image_size"] == [96, 64]
    (trained,) = [row for row in rows(folder) if "val/bbox_AP" in row]
    again = server.run(ROOT / "scripts" / "evaluate.py", f"{folder} --weights model").ok()
    assert again.numbers["bbox_AR100"] == trained["val/bbox_AR100"]
    tiles = "" if script.name == "train_sgg" else "--tile 96"
    asked = f"{folder} {min((data / 'val').iterdir())} --out {tmp_path}/found --score-threshold 0 {tiles}"
    server.run(ROOT / "scripts" / "predict.py", asked).ok()
    (image,) = json.loads((tmp_path / "found" / "predictions.json").read_text())["images"]
    assert image["detections"]
    for detection in image["detections"]:
        x, y, width, height = detection["bbox"]
        assert -width < x < 64
        assert -height < y < 64


def test_images_with_too_many_objects_are_told_before_training(server, script, settings, tmp_path):
    few = "--model.num_queries 2 --eval.max_detections 1 --run.max_steps 1 --run.epochs 1 --run.eval_every 0"
    told, _, _ = server.run(script, settings(f"--run.output_dir {tmp_path} {few}")).ok().text.partition("evaluation at")
    assert re.search("warning: .* training images have more objects .*model.num_queries 2", told), told
    assert re.search("warning: .* validation images have more objects .*eval.max_detections 1", told), told


def test_defective_records_are_dropped_when_asked_and_listed(server, script, settings, tmp_path):
    document = json.loads((DIRTY / "annotations" / "instances.json").read_text())
    document["rel_categories"] = [{"id": 1, "name": "near"}]
    document["relations"] = [[1001, 1002, 1], [16001, 5001, 1]]
    split = tmp_path / "instances.json"
    split.write_text(json.dumps(document))
    files = f"--data.train {split} --data.val {split} --data.image_dir {DIRTY}/images --data.on_error drop"
    ended = server.run(script, settings(f"--run.output_dir {tmp_path} --run.epochs 1 {files}")).ok()
    assert "data_problems_train.txt" in ended.text
    listed = (ended.folder / "data_problems_train.txt").read_text()
    for image in LEFT_OUT:
        assert f"image {image})" in listed or f"image {image}," in listed, image
    assert (ended.folder / "data_problems_val.txt").exists()


# ---- help and mistakes -----------------------------------------------------------------------------------------------


@pytest.mark.every_script
def test_help_and_print_config_have_every_key(server, script):
    helped = server.run(script, "--help all").ok()
    for key in ("--run.resume", "--data.batch_size_per_device", "--optim.accumulation_steps", "--loss.weights"):
        assert key in helped.text
    printed = server.run(script, "--print_config").ok()
    assert yaml.safe_load(printed.text.partition("\n")[2])["run"]["epochs"] > 0


@pytest.fixture(scope="module")
def mistaken(tmp_path_factory, data):
    """The folder of `FILES` and of annotations that lack a class, or all images."""
    folder = tmp_path_factory.mktemp("mistakes")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    document = json.loads((data / "annotations" / "val.json").read_text())
    *kept, removed = document["categories"]
    boxes = [box for box in document["annotations"] if box["category_id"] != removed["id"]]
    other = {"images": document["images"], "categories": kept, "annotations": boxes}
    (folder / "other_classes.json").write_text(json.dumps(other))
    (folder / "empty.json").write_text(json.dumps(other | {"images": [], "annotations": []}))
    (folder / "images").symlink_to(data / "val")  # found beside the annotation file
    return folder


@pytest.mark.parametrize(
    "given",
    [pytest.param(given, marks=[pytest.mark.every_script] * (given == OF_EVERY_SCRIPT)) for given in MISTAKES],
    ids=lambda given: given[:40],
)
def test_a_mistake_is_one_message_and_code_2(server, script, settings, mistaken, tmp_path, given):
    words = MISTAKES[given] if script.name == "train_detr" else MISTAKES[given][:1]
    args = settings(f"--run.output_dir {tmp_path} --run.eval_every 1")
    server.run(script, [*args, *given.replace("TMP", str(mistaken)).split()]).refused(*words)
    if (tmp_path / "run" / "status.json").exists():
        assert read_status(tmp_path / "run")["state"] == "bad_input"


def test_a_process_ends_with_2_and_one_message(script, tmp_path):
    command = [sys.executable, script.path, "--run.output_dir", tmp_path, "--optim.lr", "fast"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr
    assert ended.stderr.count("error: ") == 1
    assert not list(tmp_path.iterdir())
