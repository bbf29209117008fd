"""The benches run, and both sides of each compute the same; no time is asserted."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch
from places import ROOT

SCRIPTS = str(ROOT / "scripts")


@pytest.fixture(scope="module")
def benchmark():
    """scripts/benchmark.py, which finds its benches beside itself."""
    sys.path.insert(0, SCRIPTS)
    try:
        import benchmark

        yield benchmark
    finally:
        sys.path.remove(SCRIPTS)


def test_quick_run_prints_every_row_and_equal_numbers(benchmark, capsys):
    slow = {"loop", "reading", "startup", "memory", "yolov3_export"} | benchmark.ASKED_FOR
    rows = benchmark.main(["--quick", "--only", *({name for name, _, _ in benchmark.BENCHES} - slow)])
    values = {row["name"]: row["value"] for row in rows}
    assert len(values) == len(rows)
    elsewhere = ("loop,", "yolov3,", "COCO file")
    assert {name for name in benchmark.REQUIREMENTS if not name.startswith(elsewhere)} <= set(values)
    assert values["evaluation, largest difference"] <= 1e-12
    assert values["scene graph evaluation, largest difference"] <= 1e-12
    for name in ("yolov3 losses", "relation head motifs", "relation head vctree"):
        assert values[f"{name}, largest difference"] < 1e-4
    printed = capsys.readouterr().out
    for row in rows:
        assert f"| {row['name']} | " in printed and row["unit"] in printed
    assert "| evaluation, largest difference | " in printed and " | AP | ≤ 1e-12 |" in printed


@pytest.mark.parametrize("script", ["detr", "faster_rcnn", "ssd", "yolov3"])
def test_script_loop_and_bare_loop_compute_the_same(benchmark, script):
    """The loop of the script against one of a dozen lines: the same losses, step after step."""
    from benches import loop

    title, module, _ = next(wide for wide in loop.WIDE if wide[1].__name__ == f"train_{script}")
    small = {"rpn_post_nms_top_n_train": 20, "fpn_channels": 16, "representation_size": 32}
    model = loop.NARROW if script == "detr" else {"backbone": "lcnet_035"} | (small if script == "faster_rcnn" else {})
    rows = loop.measure(title, module, blocks=3, steps=2, image_size=64, model=model)
    values = {row["name"]: row["value"] for row in rows}
    assert values[f"{title}, largest difference of a loss"] < 1e-4
    assert {name for name in benchmark.REQUIREMENTS if name.startswith(f"{title},")} <= set(values)


def test_rows_are_kept_while_they_come(benchmark, monkeypatch, tmp_path):
    def two(**options):
        assert options == {"long": False, "words": ["a"], "folder": tmp_path / "new"}
        yield {"name": "gpu, a", "value": float("nan"), "unit": "out of memory"}
        assert "| gpu, a | nan | out of memory |" in (tmp_path / "new" / "table.md").read_text(encoding="utf-8")
        yield {"name": "gpu, b", "value": 2.0, "unit": "s", "required": "≤ 30"}

    monkeypatch.setattr(benchmark, "BENCHES", (("gpu", two, {}),))
    benchmark.main(["--only", "gpu", "--items", "a", "--out", str(tmp_path / "new")])
    rows = json.loads((tmp_path / "new" / "rows.json").read_text(encoding="utf-8"))["rows"]
    assert [row["value"] for row in rows] == [None, 2.0]
    assert "| gpu, b | 2 | s | ≤ 30 |" in (tmp_path / "new" / "table.md").read_text(encoding="utf-8")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_its_bench_says_so(benchmark, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmark.py", "--only", "gpu"])
    assert benchmark.command() == 2
    assert "no GPU" in capsys.readouterr().err


@pytest.mark.slow
def test_two_processes_of_the_gpu_bench_on_a_cpu(tmp_path):
    """By gloo: what it does with two GPUs by NCCL. In a process without threads, which can be forked."""
    program = (
        "import json, pathlib, sys\n"
        "from benches.gpu.items import Items\n"
        "from benches.gpu.trainings import Trainings\n"
        "items = Items(Trainings(pathlib.Path(sys.argv[1])), quick=True)\n"
        "print('ROWS', json.dumps(list(items.two_processes())))\n"
    )
    root = Path(SCRIPTS).parent
    env = os.environ | {"PYTHONPATH": f"{SCRIPTS}{os.pathsep}{root}"}
    env |= {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run([sys.executable, "-c", program, tmp_path], capture_output=True, text=True, env=env)
    assert ended.returncode == 0, ended.stderr[-4000:]
    equal, killed = json.loads(ended.stdout.partition("ROWS ")[2])
    assert equal["value"] <= 1e-5 and 0 < killed["value"] <= 30


@pytest.mark.slow  # a minute
def test_programs_beside_ours_train_and_are_judged_on_the_same_file(benchmark, monkeypatch, tmp_path):
    from benches import peers

    monkeypatch.chdir(tmp_path)
    chosen = ("our DETR", "torchvision's reference loop", "facebookresearch/detr, our weights and rates")
    rows = {row["name"]: row for row in peers.bench_peers(minutes=0.05, programs=chosen)}
    for program in chosen[:2]:
        values = {name: row["value"] for name, row in rows.items() if program in name}
        ap, ap50, steps, _, memory, first, lines = values.values()
        assert 0 <= ap <= ap50 <= 1 and min(steps, first, lines) > 0 and memory > 0.1
    assert "git clone" in rows[f"peers, shapes, {chosen[2]}, seed 0, failed"]["unit"], "it is not here"


@pytest.mark.slow
def test_programs_are_compared_on_data_sets_of_any_form_with_the_configuration_that_is_printed(
    benchmark, monkeypatch, tmp_path
):
    from benches import peers

    from toolkit.base.errors import BadInput
    from toolkit.tools.shapes import make_shapes

    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput, match="put data sets there"):
        list(peers.bench_peers_sets())
    make_shapes(tmp_path / "runs" / "peers" / "sets" / "small", train_images=8, val_images=4)
    chosen = ("our Faster R-CNN", "torchvision's reference loop")
    rows = {row["name"]: row for row in peers.bench_peers_sets(minutes=0.05, programs=chosen)}
    for program in chosen:
        assert 0 <= rows[f"peers, small, {program}, seed 0, AP"]["value"] <= 1, rows
        assert rows[f"peers, small, {program}, seed 0, steps"]["value"] > 0
    with pytest.raises(BadInput, match="put one file of weights there.*it has 0 files"):
        list(peers.bench_peers_trained())
    weights = tmp_path / "runs" / "peers" / "backbone" / "test_resnet.pth"
    weights.parent.mkdir()
    torch.save(timm.create_model("test_resnet").state_dict(), weights)
    rows = {row["name"]: row for row in peers.bench_peers_trained(minutes=0.05, programs=chosen)}
    for program in chosen:
        assert 0 <= rows[f"peers, small_trained, {program}, seed 0, AP"]["value"] <= 1, rows
    log = (tmp_path / "runs" / "peers" / "small_trained" / "our_faster_r_cnn_0" / "log.txt").read_text()
    assert f"--model.backbone=test_resnet --model.pretrained_backbone={weights}" in log


def test_boxes_of_another_program_are_read_and_judged(benchmark, tmp_path):
    """AP is 1 if its text files have the annotated boxes, and 0 if there are none."""
    from benches import peers

    from toolkit.data.formats import open_dataset
    from toolkit.tools.shapes import make_shapes

    make_shapes(tmp_path / "shapes", train_images=1, val_images=4)
    annotations = tmp_path / "shapes" / "annotations" / "val.json"
    document = json.loads(annotations.read_text())
    files = {image["id"]: tmp_path / f"{Path(image['file_name']).stem}.txt" for image in document["images"]}
    ids = [category["id"] for category in document["categories"]]
    for each in document["annotations"]:
        x, y, w, h = (side / 128 for side in each["bbox"])
        with files[each["image_id"]].open("a") as file:
            file.write(f"{ids.index(each['category_id'])} {x + w / 2} {y + h / 2} {w} {h} 0.9\n")
    table = open_dataset(str(annotations), format="coco", image_dir=str(tmp_path / "shapes" / "val"))
    for expected in (1, 0):
        peers.write_json(tmp_path / "detections.json", peers._from_yolo(table, tmp_path) if expected else [])
        assert peers.judged(str(annotations), tmp_path / "detections.json") == pytest.approx(
            {"AP": expected, "AP50": expected})  # fmt: skip


@pytest.mark.slow
def test_exported_yolov3_computes_the_same(benchmark):
    values = {row["name"]: row["value"] for row in benchmark.main(["--quick", "--only", "yolov3_export"])}
    required = {name: limit for name, limit in benchmark.REQUIREMENTS.items() if name.startswith("yolov3,")}
    assert required and all(values[name] <= float(limit.removeprefix("≤ ")) for name, limit in required.items())


@pytest.mark.slow
def test_reading_a_coco_file_is_measured(benchmark):
    values = {row["name"]: row["value"] for row in benchmark.main(["--quick", "--only", "reading"])}
    assert values["COCO file of 300 images, read"] > 0 and "COCO file of 300 images, checked, memory" in values


@pytest.mark.slow  # three processes
def test_memory_is_measured_part_by_part(benchmark):
    from benches.memory import PROGRAMS

    values = {row["name"]: row["value"] for row in benchmark.main(["--quick", "--only", "memory"])}
    for program in PROGRAMS:
        title = f"memory, {program}"
        after = {name: mib for name, mib in values.items() if name.startswith(f"{title}, after")}
        assert len(after) == (8 if program == "bare loop" else 9)
        assert 0 < after[f"{title}, after the imports"] < after[f"{title}, after all steps"]
        assert max(after.values()) <= values[f"{title}, peak"] + 1


@pytest.mark.slow
def test_costs_of_a_step_and_bytes_of_its_collectives(benchmark):
    """The figures of docs/scaling.md: parts are parts of the step, and gradients are four bytes a parameter."""
    from benches.scaling import STEP_PARTS, bench_scaling

    small = ["--data.max_train_images", "64", "--data.workers", "0", "--data.batch_size_per_device", "4"]
    rows = {(row["name"], row["unit"]): row["value"] for row in bench_scaling((1, 2), 6, small)}
    for count in (1, 2):
        parts, step = ({part: rows[f"scaling, {count} processes, {part}", "s"] for part in names}
                       for names in (STEP_PARTS, ["a step"]))  # fmt: skip
        assert min(parts.values()) >= 0 and sum(parts.values()) <= 1.2 * step["a step"]
        assert rows[f"scaling, {count} processes, checkpoint", "MB"] > 90
    trained = rows["scaling, 2 processes, trained", "parameters"]
    assert rows["scaling, 2 processes, gradients", "bytes/step"] == 4 * trained
    assert 0 < rows["scaling, 2 processes, what the step must know", "bytes/step"] < 10_000
    assert ("scaling, 1 processes, gradients", "bytes/step") not in rows
