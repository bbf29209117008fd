"""Every script on a pretended GPU (`pretended_device.py`): no tensor is on the wrong device, and the host waits for the
device as often as is said here, however large the batch.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from launching import CPU, SCRIPTS, flat, pairs, small_settings
from places import ROOT, TESTS

DETR, YOLOV3, FASTER_RCNN, SCENE_GRAPHS, SSD = SCRIPTS


class Waits(NamedTuple):
    """The largest numbers of waits of a step and of an evaluated batch, losses included."""

    step: int
    batch: int


# One wait of a step is the read of everything that it must know, one the matcher's; Faster R-CNN does not know
# beforehand how many proposals it has, and on which levels.
WAITS = {
    DETR: Waits(3, 2),
    YOLOV3: Waits(1, 2),
    FASTER_RCNN: Waits(3, 2),
    SCENE_GRAPHS: Waits(1, 1),  # of predcls
    SSD: Waits(1, 2),
}
GRAPHS = {"predcls": Waits(1, 1), "sgcls": Waits(3, 2), "sgdet": Waits(6, 3)}  # with the detector trained too
# Which samples and which detections have a mask. RF-DETR, with masks or without, matches its proposals too.
MORE_WITH_MASKS = {DETR: 1, FASTER_RCNN: 2}
# Of a step of the small settings in bf16, by phase; a phase may have a twentieth more.
LAUNCHES_OF_STEP = {
    DETR: {"forward": 692, "backward": 670, "update": 40},
    YOLOV3: {"forward": 429, "backward": 211, "update": 41},
    FASTER_RCNN: {"forward": 582, "backward": 151, "update": 42},
    SCENE_GRAPHS: {"forward": 1309, "backward": 852, "update": 43},
    SSD: {"forward": 327, "backward": 61, "update": 59},
}
EVALUATION = 4  # of a whole evaluation, beside its batches: losses are read, anchors are moved once
LAUNCHES = 40 * 32  # of an evaluated batch, 40 for each of as many images as it has by default; however many it has
HEADS = ("imp", "vctree", "transformer", "vtranse", "causal", "penet", "react", "react_pp", "squat")
FAMILY = ("conditional_detr", "deformable_detr", "dab-detr", "d_fine", "deimv2", "ecdet", "lw_detr", "detr")
SMALL = "--model.d_model 32 --model.heads 2 --model.ffn_dim 32 --model.decoder_layers 2 --model.num_queries 20"
SHORT = "--run.epochs 3 --run.max_steps 3 --run.save_every 0 --run.eval_every 0"


def environment(tmp_path: Path) -> dict[str, str]:
    env = {key: value for key, value in os.environ.items() if key != "ACCELERATE_USE_CPU"}
    return env | {"OMP_NUM_THREADS": CPU["OMP_NUM_THREADS"], "DETECTION_TOOLKIT_CACHE": str(tmp_path / "cache")}


def without_config(args: list[str]) -> list[str]:
    return flat({name: value for name, value in pairs(args).items() if name != "--config"})


def pretended(tmp_path: Path, cases: list[tuple[str, list]], faults: list[dict] = ()) -> list[dict]:
    """What `pretended_run.py` finds for each (script, arguments); all of them end well. faults: of the last."""
    path = tmp_path / "cases.json"
    listed = [[script, list(map(str, args))] for script, args in cases]
    listed[-1].append(list(faults))
    path.write_text(json.dumps(listed))
    command = [sys.executable, TESTS / "scripts" / "pretended_run.py", path]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=1500, cwd=tmp_path, env=environment(tmp_path)
    )
    measured = [json.loads(line[6:]) for line in ended.stdout.splitlines() if line.startswith("FOUND ")]
    assert [run["code"] for run in measured] == [0] * len(cases), f"{ended.stdout[-3000:]}\n{ended.stderr[-6000:]}"
    return measured


def assert_few_waits(measured: dict, waits: Waits, batches: int, launches: int = LAUNCHES) -> None:
    """Waits inside transformers are not counted."""
    for part, most in (("step", waits.step), ("evaluation", waits.batch * batches + EVALUATION)):
        places = measured[part]["places"]
        assert sum(count for place, count in places.items() if "transformers/" not in place) <= most, places
    assert measured["evaluation"]["launches"] <= launches * batches, measured["evaluation"]["launches_at"]
    assert not measured["step"]["unpinned"], "pageable memory is copied twice"


GRADIENTS_OF_A_NORM = f"""
import pathlib, pretended_device, torch
log = pretended_device.install(pathlib.Path({str(ROOT)!r}))
norm = torch.nn.BatchNorm2d(3).to("cuda")
maps = torch.rand(2, 3, 4, 4, device="cuda").bfloat16()
summed = norm(maps).sum()
log.recording = True
summed.backward()
print([event.op for event in log.events if event.op.startswith("_to_copy")], norm.weight.grad.dtype)
"""


def test_gradients_of_norms_are_in_the_precision_of_their_weights_as_on_cuda(tmp_path):
    command = [sys.executable, "-c", GRADIENTS_OF_A_NORM]
    env = environment(tmp_path) | {"PYTHONPATH": str(TESTS / "scripts")}
    ended = subprocess.run(command, capture_output=True, text=True, env=env)
    assert ended.stdout.strip() == "[] torch.float32", ended.stderr


@pytest.mark.slow
@pytest.mark.every_script
def test_waits_do_not_depend_on_the_batch_or_the_precision(script, settings, tmp_path):
    step, batch = WAITS[script]
    cases = {  # settings, waits and batches of the evaluation
        "small": ("", step, 4),
        "large": ("--data.batch_size_per_device 9 --eval.batch_size_per_device 5", step, 2),
        # The scaler's; and where gradients overflow, whether the state is broken, and whether only their norm is.
        "fp16": ("--run.precision fp16", step + 3, 4),
    }
    if script == DETR:
        cases["auto"] = ("--run.precision auto", step, 4)
        cases["twice"] = ("--optim.accumulation_steps 2", 2 * step - 1, 4)  # there is one read of a step
    mode = "--model.mode predcls --eval.metric_for_best R@20" if script == SCENE_GRAPHS else ""
    runs = []
    for name, (more, _, _) in cases.items():
        args = settings(f"--run.output_dir {tmp_path} --run.name {name} {SHORT} {mode} {more}")
        runs.append((script.name, args))
    measured = dict(zip(cases, pretended(tmp_path, runs), strict=True))
    for name, (_, most, batches) in cases.items():
        assert_few_waits(measured[name], Waits(most, batch), batches)
    assert measured["small"]["step"]["places"] == measured["large"]["step"]["places"]
    if script == DETR:
        run = yaml.safe_load((tmp_path / "auto" / "config.yaml").read_text())["run"]
        assert (run["precision"], run["tf32"]) == ("bf16", True), "where a device has both"


@pytest.mark.slow
@pytest.mark.every_script
def test_no_phase_of_a_step_has_more_launches_than_it_had(script, settings, tmp_path):
    """Where one has far fewer, note the new number."""
    args = settings(f"--run.output_dir {tmp_path} {SHORT} --run.precision bf16")
    (measured,) = pretended(tmp_path, [(script.name, args)])
    found = measured["step"]["phases"]
    expected = LAUNCHES_OF_STEP[script]
    assert found.keys() == expected.keys()
    for phase, launches in expected.items():
        assert found[phase] <= 1.05 * launches, found


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "heads"), [("predcls", ()), ("sgcls", ()), ("sgdet", HEADS)])
def test_scene_graphs_wait_as_often_however_large_the_batch(mode, heads, data, tmp_path):
    cases = [("motifs", 4, 3), ("motifs", 9, 5), *((head, 4, 3) for head in heads)]  # head, batch, evaluated batch
    runs = []
    for head, batch, evaluated in cases:
        place = f"--run.output_dir {tmp_path} --run.name {head}_{batch} {SHORT} --eval.metric_for_best R@20"
        batches = f"--data.batch_size_per_device {batch} --eval.batch_size_per_device {evaluated}"
        model = f"--model.mode {mode} --model.head {head} --model.head_options {{}}"
        args = small_settings(SCENE_GRAPHS, data, f"{place} {batches} {model}")
        runs.append((SCENE_GRAPHS.name, args))
    for (head, _, evaluated), measured in zip(cases, pretended(tmp_path, runs), strict=True):
        trees = int(head == "vctree")  # it waits once for them, and goes along them level by level
        waits = Waits(GRAPHS[mode].step + trees, GRAPHS[mode].batch + trees)
        assert_few_waits(measured, waits, -(-10 // evaluated), LAUNCHES * (1 + trees))


@pytest.mark.slow
@pytest.mark.every_script
@pytest.mark.parametrize("script", MORE_WITH_MASKS, ids=lambda script: script.name)
def test_masks_add_no_wait_to_a_step(script, data, tmp_path):
    args = small_settings(script, data, f"--run.output_dir {tmp_path} {SHORT} --model.masks true")
    if script == DETR:
        of_rf_detr = f"--model.architecture rf_detr --model.encoder_layers 4 --data.image_size 112 {SMALL}"
        args = without_config([*args, *of_rf_detr.split()])
    (measured,) = pretended(tmp_path, [(script.name, args)])
    step, batch = WAITS[script]
    assert_few_waits(measured, Waits(step, batch + MORE_WITH_MASKS[script]), 4, 2 * LAUNCHES)


@pytest.mark.slow
def test_the_whole_family_runs_on_a_device(data, tmp_path):
    runs = []
    for name in FAMILY:
        place = f"--run.output_dir {tmp_path} --run.name {name} --data.image_size 128 {SHORT}"
        backbone = "" if name in ("ecdet", "lw_detr") else "--model.backbone test_resnet"
        args = small_settings(DETR, data, f"{place} --model.architecture {name} {backbone} {SMALL}")
        runs.append((DETR.name, without_config(args)))
    for name, measured in zip(FAMILY, pretended(tmp_path, runs), strict=True):
        launches = LAUNCHES * (1 + (name in ("ecdet", "lw_detr")))  # transformers of 12 and 10 layers
        step, batch = WAITS[DETR]
        assert_few_waits(
            measured, Waits(step, batch + (name == "lw_detr")), 4, launches
        )  # it matches its proposals too


@pytest.mark.slow
def test_a_run_goes_from_the_cpu_to_a_device_and_back_behind_a_nan(server, script, settings, tmp_path):
    resumed = "--run.resume latest --run.resume_schedule new --run.on_nonfinite rollback"
    to_step = f"--run.output_dir {tmp_path} --run.epochs 9 --run.save_every 1 {resumed} --run.max_steps"
    server.run(script, settings(f"{to_step} 2")).ok()
    pretended(tmp_path, [(script.name, settings(f"{to_step} 4"))], [{"nan": "loss", "window": 2}])
    ended = server.run(script, settings(f"{to_step} 6")).ok()
    assert ended.trained == [1, 2, 3, 4, 5, 6]
    assert list((ended.folder / "nan").glob("step_*"))


@pytest.mark.slow
def test_the_bench_of_a_gpu_from_its_first_line_to_the_table(tmp_path):
    """`make gpu` with small sizes: in each of its processes the device is there from the start of Python."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(
        "import pathlib, sys\n"
        f"sys.path.append({str(TESTS / 'scripts')!r})\n"
        "import pretended_device\n"
        f"pretended_device.install(pathlib.Path({str(ROOT)!r}))\n"
    )
    out = tmp_path / "gpu"
    command = [sys.executable, ROOT / "scripts" / "benchmark.py", "--only", "gpu", "--quick", "--out", out]
    command += ["--items", "bf16", "train_ssd, resumed", "parity", "moves", "train_ssd, whole"]
    env = environment(tmp_path) | {"PYTHONPATH": str(site)}
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env)
    assert ended.returncode == 0, ended.stderr[-6000:]
    rows = {}
    for row in json.loads((out / "rows.json").read_text())["rows"]:
        assert row["value"] is not None, ended.stderr[-6000:]
        rows[row["name"].removeprefix("gpu, ")] = row
    for script, waits in WAITS.items():
        assert rows[f"{script.name}, bf16, speed"]["value"] > 0
        assert rows[f"{script.name}, bf16, until step 1"]["value"] > 0
        assert rows[f"{script.name}, bf16, kernels"]["longest_ms"] == {}, "a device that is pretended has none"
        of_step = rows[f"{script.name}, bf16, waits"]["value"]
        assert of_step <= waits.step + 1, "those inside transformers are counted too"
        assert abs(rows[f"{script.name}, parity, loss of step 1, GPU / CPU - 1"]["value"]) <= 1e-3
    without_noise = rows["train_detr, parity, loss of step 1 without noisy queries, GPU / CPU - 1"]["value"]
    assert abs(without_noise) <= 1e-3
    assert {name for name in rows if "loop, speed" in name or "Trainer, speed" in name} == {
        "train_detr, bf16, transformers' Trainer, speed",
        "train_faster_rcnn, bf16, torchvision's reference loop, speed",
        "train_ssd, bf16, bare loop, speed",
    }
    assert rows["train_ssd, bf16, two kernels tried, speed"]["value"] > 0
    assert rows["train_ssd, resumed, tensors that differ, after a kill"]["value"] == 0
    assert rows["moves, CPU, GPU, CPU: largest difference of a loss"]["value"] <= 1e-4
    assert "finite" in rows["train_ssd, whole, fp16, training with a NaN"]["unit"]
    assert "AP" in rows["train_ssd, whole, fp16, evaluate"]["unit"]
    assert "| gpu, train_sgg, bf16, speed |" in (out / "table.md").read_text(encoding="utf-8")
    assert (out / "log.txt").stat().st_size > 0
