"""The benches run, and both sides of each compute the same; no time is asserted."""

import json
import math
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import timm
import torch
import yaml
from places import ROOT

from toolkit.base.errors import BadInput
from toolkit.data.formats import open_dataset
from toolkit.tools.shapes import make_shapes

sys.path.insert(0, str(ROOT / "scripts"))
import benchmark
from benches import loop, measuring, peers
from benches.gpu import items as gpu_items
from benches.gpu import schedule
from benches.gpu.trainings import Driven, Measured, Plan, kernels_in

ELSEWHERE = ("loop,", "yolov3,", "COCO file")  # rows of benches with a test of their own
LARGEST_DIFFERENCES = {
    "evaluation": 1e-12,
    "scene graph evaluation": 1e-12,
    "yolov3 losses": 1e-4,
    "relation head motifs": 1e-4,
    "relation head vctree": 1e-4,
}


def values_of(rows) -> dict[str, float]:
    values = {row["name"]: row["value"] for row in rows}
    assert len(values) == len(rows)
    return values


def required(begin: str) -> dict[str, str]:
    return {name: limit for name, limit in benchmark.REQUIREMENTS.items() if name.startswith(begin)}


def test_a_quick_run_prints_every_row_and_equal_numbers(capsys):
    slow = {"loop", "launches", "reading", "startup", "memory", "yolov3_export"} | benchmark.ASKED_FOR
    rows = benchmark.main(["--quick", "--only", *({name for name, _, _ in benchmark.BENCHES} - slow)])
    values = values_of(rows)
    assert {name for name in benchmark.REQUIREMENTS if not name.startswith(ELSEWHERE)} <= set(values)
    for name, limit in LARGEST_DIFFERENCES.items():
        assert values[f"{name}, largest difference"] <= limit
    printed = capsys.readouterr().out
    for row in rows:
        assert f"| {row['name']} | " in printed
        assert row["unit"] in printed
    assert " | AP | ≤ 1e-12 |" in printed


@pytest.mark.parametrize("script", ["detr", "faster_rcnn", "ssd", "yolov3"])
def test_script_loop_and_bare_loop_compute_the_same(script):
    """The loop of the script against one of a dozen lines: the same losses, step after step."""
    title, module, _ = next(wide for wide in loop.WIDE if wide[1].__name__ == f"train_{script}")
    model = {"backbone": "lcnet_035"}
    if script == "detr":
        model = loop.NARROW
    if script == "faster_rcnn":
        model |= {"rpn_post_nms_top_n_train": 20, "fpn_channels": 16, "representation_size": 32}
    values = values_of([*loop.measure(title, module, blocks=3, steps=2, image_size=64, model=model)])
    assert values[f"{title}, largest difference of a loss"] < 1e-4
    assert set(required(f"{title},")) <= set(values)


def test_rows_are_kept_while_they_come(monkeypatch, tmp_path):
    table = tmp_path / "new" / "table.md"

    def bench(**options):
        assert options == {"long": False, "words": ["a"], "folder": tmp_path / "new"}
        yield {"name": "gpu, a", "value": float("nan"), "unit": "out of memory"}
        assert "| gpu, a | nan | out of memory |" in table.read_text(encoding="utf-8")
        yield {"name": "gpu, b", "value": 2.0, "unit": "s", "required": "≤ 30"}

    monkeypatch.setattr(benchmark, "BENCHES", (("gpu", bench, {}),))
    benchmark.main(["--only", "gpu", "--items", "a", "--out", str(tmp_path / "new")])
    rows = json.loads((tmp_path / "new" / "rows.json").read_text(encoding="utf-8"))["rows"]
    assert [row["value"] for row in rows] == [None, 2.0]
    assert "| gpu, b | 2 | s | ≤ 30 |" in table.read_text(encoding="utf-8")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_its_bench_says_so(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmark.py", "--only", "gpu"])
    assert benchmark.command() == 2
    assert "no GPU" in capsys.readouterr().err


def titles_of(long: bool) -> list[str]:
    groups = schedule.groups(1, long=long, quick=False)
    return [item.title for group in groups for item in group]


def test_items_of_the_gpu_bench_come_by_their_value():
    titles = titles_of(long=False)
    speeds = [f"{script}, bf16" for script in schedule.SECONDS_OF_SPEED]
    assert titles[:7] == [*speeds, "train_faster_rcnn, bf16, compiled", "train_yolov3, bf16, graphs"]
    late = titles.index("train_ssd, bf16, two kernels tried")
    assert titles.index("train_yolov3, resumed") < late < titles.index("train_faster_rcnn, TF32")
    only_long = {*titles_of(long=True)} - {*titles}
    assert {"train_faster_rcnn, resumed", "train_sgg, resumed"} <= only_long
    assert {*titles} <= {*titles_of(long=True)}


@pytest.mark.parametrize("script", gpu_items.RECIPES)
def test_pictures_of_the_gpu_bench_are_whole_batches(script):
    name, *arguments = gpu_items.RECIPES[script]
    settings = yaml.safe_load((ROOT / "configs" / f"{name}.yaml").read_text())
    batch = int(arguments[-1]) if arguments else settings["data"]["batch_size_per_device"]
    count = gpu_items.ON_SHAPES.index("--data.max_train_images") + 1
    assert int(gpu_items.ON_SHAPES[count]) % batch == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the bench forks")
def test_an_item_of_the_gpu_bench_that_is_ended_keeps_what_it_has_told(tmp_path):
    def measure(items):
        items.tell(measuring.row("until step 1", 3.0, "s"))
        time.sleep(60)
        yield measuring.row("speed", 1.0, "images/s")

    item = schedule.Item("slow", 2, measure)
    group = schedule._Group([item], tmp_path, tmp_path / "log.txt", math.inf, long=False, quick=False)
    told, ended = group.rows()
    assert (told["name"], told["value"]) == ("gpu, slow, until step 1", 3.0)
    assert ended["name"] == "gpu, slow, not finished"
    assert "was ended after 2 s" in ended["unit"]


@pytest.fixture
def without_device(monkeypatch):
    """Calls that need a GPU do nothing, and warnings are shown as before afterwards."""
    for name in ("synchronize", "reset_peak_memory_stats", "set_sync_debug_mode"):
        monkeypatch.setattr(torch.cuda, name, lambda *given: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 2**30)
    with warnings.catch_warnings():
        yield


def test_a_training_of_the_gpu_bench_tells_each_part_once_it_is_over(without_device, tmp_path):
    told = []
    plan = Plan(warm_up=1, steps=2, waited=1, profiled=1, tell=told.append)
    driven = Driven(tmp_path, plan)
    told_at = []
    for step in range(5):
        driven.tick(step, images=4)
        told_at.append(len(told))
    with pytest.raises(Measured):
        driven.tick(5, images=4)
    values = values_of(told)
    assert told_at == [1, 2, 2, 7, 8]
    assert list(values) == [
        "until step 1",
        "steps 1 to 1",
        "batch",
        "waiting for data",
        "rest of the time between two steps",
        "speed",
        "memory",
        "waits",
        "GPU busy",
        "kernels",
    ]
    assert values["batch"] == 4
    assert values["memory"] == 1
    assert values["speed"] == float((tmp_path / "images_per_s.txt").read_text())


PROFILED = {  # microseconds
    ("gemm", "CUDA"): [(300, 400), (0, 100)],
    ("relu", "CUDA"): [(50, 150), (60, 70)],
    ("Memcpy HtoD (Pinned -> Device)", "CUDA"): [(150, 290)],
    ("cudaLaunchKernel", "CPU"): [(0, 1000)],
}


def profiled_events() -> list[SimpleNamespace]:
    """What a profile has of kernels, copies and calls."""
    events = []
    for (name, device), spans in PROFILED.items():
        kind = getattr(torch.autograd.DeviceType, device)
        for start, end in spans:
            time_range = SimpleNamespace(start=start, end=end)
            event = SimpleNamespace(name=name, device_type=kind, time_range=time_range)
            events.append(event)
    return events


def test_kernels_of_a_profile():
    """Two kernels at once are busy once; copies and calls of the host are not kernels."""
    count, busy_s, longest_s = kernels_in(profiled_events())
    assert count == 4
    assert busy_s == pytest.approx(250e-6)
    assert dict(longest_s) == pytest.approx({"gemm": 200e-6, "relu": 110e-6})
    assert kernels_in([]) == (0, 0.0, [])


ON_TWO = """
import json, pathlib, sys
from benches.gpu.items import Items
from benches.gpu.trainings import Trainings
items = Items(Trainings(pathlib.Path(sys.argv[1])), quick=True)
print('ROWS', json.dumps(list(items.two_processes())))
"""


@pytest.mark.slow
def test_two_processes_of_the_gpu_bench_on_a_cpu(tmp_path):
    """By gloo: what it does with two GPUs by NCCL. In a process without threads, which can be forked."""
    env = os.environ | {"PYTHONPATH": f"{ROOT / 'scripts'}{os.pathsep}{ROOT}"}
    env |= {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run([sys.executable, "-c", ON_TWO, tmp_path], capture_output=True, text=True, env=env)
    assert ended.returncode == 0, ended.stderr[-4000:]
    equal, killed = json.loads(ended.stdout.partition("ROWS ")[2])
    assert equal["value"] <= 1e-5
    assert 0 < killed["value"] <= 30


@pytest.mark.slow
def test_programs_beside_ours_are_judged_on_the_same_file(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    absent = "facebookresearch/detr, our weights and rates"
    chosen = ("our DETR", "torchvision's reference loop", absent)
    rows = {row["name"]: row for row in peers.bench_peers(minutes=0.05, programs=chosen)}
    for program in chosen[:2]:
        values = [row["value"] for name, row in rows.items() if program in name]
        ap, ap50, steps, _, memory, first, lines = values
        assert 0 <= ap <= ap50 <= 1
        assert min(steps, first, lines) > 0
        assert memory > 0.1
    assert "git clone" in rows[f"peers, shapes, {absent}, seed 0, failed"]["unit"], "it is not here"


@pytest.mark.slow
def test_programs_are_compared_on_any_data_set_with_the_printed_configuration(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "peers"
    chosen = ("our Faster R-CNN", "torchvision's reference loop")
    with pytest.raises(BadInput, match="put data sets there"):
        list(peers.bench_peers_sets())
    make_shapes(folder / "sets" / "small", train_images=8, val_images=4)
    with pytest.raises(BadInput, match="put one file of weights there.*it has 0 files"):
        list(peers.bench_peers_trained())
    weights = folder / "backbone" / "test_resnet.pth"
    weights.parent.mkdir()
    torch.save(timm.create_model("test_resnet").state_dict(), weights)
    for name, bench in (("small", peers.bench_peers_sets), ("small_trained", peers.bench_peers_trained)):
        rows = {row["name"]: row["value"] for row in bench(minutes=0.05, programs=chosen)}
        for program in chosen:
            assert 0 <= rows[f"peers, {name}, {program}, seed 0, AP"] <= 1
            assert rows[f"peers, {name}, {program}, seed 0, steps"] > 0
    log = (folder / "small_trained" / "our_faster_r_cnn_0" / "log.txt").read_text()
    assert f"--model.backbone=test_resnet --model.pretrained_backbone={weights}" in log


@pytest.mark.parametrize("is_found", [True, False])
def test_boxes_of_another_program_are_read_and_judged(tmp_path, is_found):
    """AP is 1 if its text files have the annotated boxes, and 0 if there are none."""
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
    results = peers._from_yolo(table, tmp_path) if is_found else []
    peers.write_json(tmp_path / "detections.json", results)
    judged = peers.judged(str(annotations), tmp_path / "detections.json")
    expected = float(is_found)
    assert judged == pytest.approx({"AP": expected, "AP50": expected})


@pytest.mark.slow
def test_exported_yolov3_computes_the_same():
    values = values_of(benchmark.main(["--quick", "--only", "yolov3_export"]))
    limits = required("yolov3,")
    assert limits
    for name, limit in limits.items():
        assert values[name] <= float(limit.removeprefix("≤ "))


@pytest.mark.slow
def test_reading_a_coco_file_is_measured():
    values = values_of(benchmark.main(["--quick", "--only", "reading"]))
    assert values["COCO file of 300 images, read"] > 0
    assert "COCO file of 300 images, checked, memory" in values


@pytest.mark.slow
def test_memory_is_measured_part_by_part():
    from benches.memory import PROGRAMS

    values = values_of(benchmark.main(["--quick", "--only", "memory"]))
    for program in PROGRAMS:
        title = f"memory, {program}"
        after = {name: mib for name, mib in values.items() if name.startswith(f"{title}, after")}
        assert len(after) == (8 if program == "bare loop" else 9)
        assert 0 < after[f"{title}, after the imports"] < after[f"{title}, after all steps"]
        assert max(after.values()) <= values[f"{title}, peak"] + 1


@pytest.mark.slow
def test_launches_are_counted_in_one_process_and_in_each_of_two():
    from benches.launches import bench_launches

    values = values_of([*bench_launches(["train_ssd"])])
    one, two = (f"train_ssd, a step in {processes}" for processes in ("1 process", "2 processes"))
    assert values[f"{one}, waits"] == values[f"{two}, waits"] == 1
    assert values[f"{one}, launches"] + 200 < values[f"{two}, launches"], "each gradient is copied"


@pytest.mark.slow
def test_costs_of_a_step_and_bytes_of_its_collectives():
    """The figures of docs/scaling.md: parts are parts of the step, and gradients are four bytes a parameter."""
    from benches.scaling import STEP_PARTS, bench_scaling

    small = "--data.max_train_images 64 --data.workers 0 --data.batch_size_per_device 4".split()
    rows = {(row["name"], row["unit"]): row["value"] for row in bench_scaling((1, 2), 6, small)}
    for count in (1, 2):
        title = f"scaling, {count} processes"
        parts = [rows[f"{title}, {part}", "s"] for part in STEP_PARTS]
        assert min(parts) >= 0
        assert sum(parts) <= 1.2 * rows[f"{title}, a step", "s"]
        assert rows[f"{title}, checkpoint", "MB"] > 90
    trained = rows["scaling, 2 processes, trained", "parameters"]
    assert rows["scaling, 2 processes, gradients", "bytes/step"] == 4 * trained
    assert 0 < rows["scaling, 2 processes, what the step must know", "bytes/step"] < 10_000
    assert ("scaling, 1 processes, gradients", "bytes/step") not in rows
