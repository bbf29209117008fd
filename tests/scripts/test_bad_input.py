"""Mistakes of the user: one clear message, exit code 2, no traceback, nothing lost."""

import json
import subprocess
import sys

import pytest
from launching import ROOT

DIRTY = ROOT / "tests" / "data" / "dirty"
FILES = {
    "wrong_key.yaml": "optim: {learning_rate: 1.0e-3}",
    "wrong_type.yaml": "optim: {lr: fast}",
    "torn.yaml": "optim: {lr: [",
    "plain_file": "",
}
# arguments ({tmp} and {data} are folders) -> what the message must name
CASES = {
    "missing config": (["--config", "{tmp}/none.yaml"], ["none.yaml"]),
    "wrong key in YAML": (["--config", "{tmp}/wrong_key.yaml"], ["learning_rate", "wrong_key.yaml"]),
    "wrong type in YAML": (["--config", "{tmp}/wrong_type.yaml"], ["optim.lr", "fast"]),
    "torn YAML": (["--config", "{tmp}/torn.yaml"], ["torn.yaml", "line 1"]),
    "wrong flag": (["--optim.learning_rate", "1"], ["learning_rate"]),
    "negative number": (["--optim.lr", "-1"], ["optim.lr", "-1"]),
    "missing annotations": (["--data.train", "{tmp}/none.json"], ["none.json"]),
    "unknown architecture": (["--model.architecture", "detrr"], ["model.architecture", "detrr", "rt_detr_v2"]),
    "unknown backbone": (["--model.backbone", "resnet10"], ["resnet10", "resnet10t"]),
    "other classes": (["--data.val", "{tmp}/other_classes.json"], ["4 classes", "3", "circle"]),
    "empty split": (["--data.train", "{tmp}/empty.json"], ["empty.json", "`images` is empty"]),
    "batch too large": (["--data.batch_size_per_device", "64"], ["64", "18", "batch_size_per_device"]),
    "file as output folder": (["--run.output_dir", "{tmp}/plain_file"], ["plain_file", "--run.output_dir"]),
    "output nowhere": (["--run.output_dir", "/proc/runs"], ["/proc/runs", "--run.output_dir"]),
    "no checkpoint": (["--run.resume", "{tmp}"], ["no usable checkpoint"]),
    "unannounced loss": (["--loss.weights", '{{"loss_dice": 1.0}}'], ["loss_dice", "loss_bbox"]),
    "wrong loss weight": (["--loss.weights", '{{"loss_bbox": "high"}}'], ["loss_bbox", "high"]),
    "no such time": (["--run.eval_every", "often"], ["often", "epochs"]),
    "no milestones": (["--schedule.name", "multistep"], ["schedule.milestones"]),
    "missing source": (["--model.pretrained", "runs/of/nobody"], ["runs/of/nobody does not exist"]),
    "unknown compiler": (["--optim.compile", "gcc"], ["inductor"]),
    "no such augmentation": (["--data.augment", '["RandomFlip"]'], ["RandomFlip"]),
    "no such parameters": (["--optim.lr_multipliers", '{{"neck": 0.1}}'], ["optim.lr_multipliers.neck"]),
    "scales for a model of one size": (["--data.scales", "[64,96]"], ["data.scales", "one size"]),
    "size that would be padded": (["--data.image_size", "98"], ["98 px", "multiples of 32, such as 96"]),
    "pair that would be padded": (["--data.image_size", "[100, 64]"], ["100 x 64 px", "such as [96, 64]"]),
    "no size": (["--data.image_size", "[64, 64, 3]"], ["[64, 64, 3] is not a size of", "[height, width]"]),
    "defective data": (["--data.train", str(DIRTY / "annotations" / "instances.json")], ["image 2)", "image 28)"]),
    "name too long": (["--run.name", "x" * 300], ["File name too long", "Give a shorter --run.name"]),
    "checkpoint with too long a name": (["--run.resume", "{tmp}/" + "x" * 300], ["too long"]),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("bad")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    document = json.loads((data / "annotations" / "val.json").read_text())
    for key in ("rel_annotations", "rel_categories"):
        document.pop(key)
    *kept, gone = document["categories"]
    other = [a for a in document["annotations"] if a["category_id"] != gone["id"]]
    (folder / "other_classes.json").write_text(json.dumps(document | {"categories": kept, "annotations": other}))
    (folder / "images").symlink_to(data / "val")  # found beside the annotation file
    (folder / "empty.json").write_text(json.dumps(document | {"images": [], "annotations": []}))
    return folder


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.every_script] * (case == "unknown backbone")) for case in CASES]
)
def test_one_message_and_code_2(server, script, settings, data, folder, case):
    given, wanted = CASES[case]
    if script.name != "train_detr":
        wanted = wanted[:1]  # the rest are names of its losses and architectures
    given = [part.format(tmp=folder, data=data) for part in given]
    common = ["--data.image_dir", str(DIRTY / "images")] if str(DIRTY) in str(given) else []
    name = f"{script.name}_{case}".replace(" ", "_")
    args = settings("--run.output_dir", folder / "runs", "--run.name", name, "--run.eval_every", 1, *common)
    ended = server.run(script, [*args, *given])
    assert ended.code == 2 and "Traceback" not in ended.text and "error: " in ended.text, ended.text
    assert all(word in ended.text for word in wanted), ended.text
    status = folder / "runs" / name / "status.json"
    if status.exists():
        assert json.loads(status.read_text())["state"] == "bad_input"


def test_all_ranks_end_alike(server, script, settings, tmp_path):
    args = settings("--run.output_dir", tmp_path, "--data.train", DIRTY / "annotations" / "instances.json",
                    "--data.image_dir", DIRTY / "images")  # fmt: skip
    assert server.run(script, args, processes=2).code == 2


def test_dropping_defective_records_trains_and_lists_them(server, script, settings, tmp_path):
    document = json.loads((DIRTY / "annotations" / "instances.json").read_text())
    relations = {"rel_categories": [{"id": 1, "name": "near"}], "relations": [[1001, 1002, 1], [16001, 5001, 1]]}
    split = tmp_path / "instances.json"
    split.write_text(json.dumps(document | relations))
    args = settings("--run.output_dir", tmp_path, "--data.train", split, "--data.val", split, "--data.image_dir",
                    DIRTY / "images", "--data.on_error", "drop", "--run.epochs", 1)  # fmt: skip
    ended = server.run(script, args).ok()
    listed = (ended.folder / "data_problems_train.txt").read_text()
    for image in (2, 3, 4, 9, 10, 11, 12, 13, 14, 15, 21, 23, 24, 25, 26, 27, 28):
        assert f"image {image})" in listed or f"image {image}," in listed, image
    assert "data_problems_train.txt" in ended.text
    assert (ended.folder / "data_problems_val.txt").exists()


def test_real_process_ends_with_2_and_one_message(script, tmp_path):
    command = [sys.executable, script.path, "--run.output_dir", tmp_path, "--optim.lr", "fast"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert ended.returncode == 2 and "Traceback" not in ended.stderr and ended.stderr.count("error: ") == 1
    assert not list(tmp_path.iterdir())
