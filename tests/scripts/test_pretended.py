"""Every script on a pretended GPU (`pretended_device.py`): no tensor is on the wrong device, and the host waits for the
device as often as is said here, however large the batch.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from launching import CPU, ROOT, SCRIPTS, Script, flat, pairs, training_rows

# Largest numbers of waits. Of a step: one is the read of everything that it must know, one the matcher's; Faster R-CNN
# does not know beforehand how many proposals it has, and on which levels. Of an evaluated batch, losses included.
STEP = {"train_detr": 3, "train_yolov3": 1, "train_faster_rcnn": 3, "train_sgg": 1, "train_ssd": 1}
EVALUATED = {"train_detr": 2, "train_yolov3": 2, "train_faster_rcnn": 2, "train_sgg": 1, "train_ssd": 1}
# More waits of an evaluated batch with masks: which samples and which detections have one. RF-DETR, with masks or
# without, matches its proposals too.
MASKED = {"train_detr": 1, "train_faster_rcnn": 2}
EVALUATION = 4  # of a whole evaluation, beside its batches: losses are read, anchors are moved once
LAUNCHES = 40 * 32  # of an evaluated batch, 40 for each of as many images as it has by default; however many it has
MODES = {mode: ["--model.mode", mode, "--eval.metric_for_best", "R@20"] for mode in ("predcls", "sgcls", "sgdet")}
GRAPHS = {"predcls": (1, 1), "sgcls": (3, 2), "sgdet": (6, 3)}  # a step and an evaluated batch, detector trained too
HEADS = ("imp", "vctree", "transformer", "vtranse", "causal", "penet", "react", "react_pp", "squat")
FAMILY = ("conditional_detr", "deformable_detr", "dab-detr", "d_fine", "deimv2", "ecdet", "lw_detr", "detr")
SMALL = {"--model.backbone": "test_resnet", "--model.d_model": 32, "--model.heads": 2, "--model.ffn_dim": 32,
         "--model.decoder_layers": 2, "--model.num_queries": 20}  # fmt: skip
SHORT = ("--run.epochs", 3, "--run.max_steps", 3, "--run.save_every", 0, "--run.eval_every", 0)


def pretended(tmp_path: Path, cases: list[tuple[str, list]], faults: list[dict] = ()) -> list[dict]:
    """What `pretended_run.py` finds for each (script, arguments); all of them end well. faults: of the last."""
    path = tmp_path / "cases.json"
    listed = [[script, list(map(str, args))] for script, args in cases]
    listed[-1].append(list(faults))
    path.write_text(json.dumps(listed))
    command = [sys.executable, ROOT / "tests" / "scripts" / "pretended_run.py", path]
    env = {key: value for key, value in os.environ.items() if key != "ACCELERATE_USE_CPU"}
    env |= {"OMP_NUM_THREADS": CPU["OMP_NUM_THREADS"], "DETECTION_TOOLKIT_CACHE": str(tmp_path / "cache")}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=1500, cwd=tmp_path, env=env)
    measured = [json.loads(line[6:]) for line in ended.stdout.splitlines() if line.startswith("FOUND ")]
    assert [run["code"] for run in measured] == [0] * len(cases), f"{ended.stdout[-3000:]}\n{ended.stderr[-6000:]}"
    return measured


def counted(part: dict) -> int:
    """Waits without those inside transformers."""
    return sum(count for place, count in part["places"].items() if "transformers/" not in place)


def assert_few_waits(measured: dict, step: int, batch: int, batches: int, launches: int = LAUNCHES) -> None:
    assert counted(measured["step"]) <= step, measured["step"]["places"]
    assert counted(measured["evaluation"]) <= batch * batches + EVALUATION, measured["evaluation"]["places"]
    assert measured["evaluation"]["launches"] <= launches * batches, measured["evaluation"]["launches_at"]
    assert not measured["step"]["unpinned"], "pageable memory is copied twice"


@pytest.mark.slow
@pytest.mark.every_script
def test_waits_do_not_depend_on_the_batch(script: Script, settings, tmp_path):
    """Nor on the precision; in two micro-batches a step waits twice as often, but for its one read."""
    step, batch = STEP[script.name], EVALUATED[script.name]
    # fp16: the scaler's; and where gradients overflow, whether the state is broken, and whether only their norm is
    cases = {"small": ([], step, 4), "fp16": (["--run.precision", "fp16"], step + 3, 4),
             "large": (["--data.batch_size_per_device", 9, "--eval.batch_size_per_device", 5], step, 2)}  # fmt: skip
    if script == SCRIPTS[0]:
        cases |= {"bf16": (["--run.precision", "bf16"], step, 4),
                  "twice": (["--optim.accumulation_steps", 2], 2 * step - 1, 4)}  # fmt: skip
    mode = MODES["predcls"] if script.name == "train_sgg" else ()
    runs = [(script.name, settings("--run.output_dir", tmp_path, "--run.name", name, *SHORT, *mode, *args))
            for name, (args, *_) in cases.items()]  # fmt: skip
    measured = dict(zip(cases, pretended(tmp_path, runs), strict=True))
    for name, (_, waits, batches) in cases.items():
        assert_few_waits(measured[name], waits, batch, batches)
    assert measured["small"]["step"]["places"] == measured["large"]["step"]["places"]


@pytest.mark.slow
@pytest.mark.every_script
@pytest.mark.parametrize("script", [script for script in SCRIPTS if script.name == "train_sgg"], indirect=True)
@pytest.mark.parametrize(("mode", "heads"), [("predcls", ()), ("sgcls", ()), ("sgdet", HEADS)])
def test_scene_graphs_wait_as_often_however_large_the_batch(mode, heads, settings, script, tmp_path):
    plain = [("motifs", 4, 3), ("motifs", 9, 5), *((head, 4, 3) for head in heads)]
    cases = [(script.name, settings("--run.output_dir", tmp_path, "--run.name", f"{head}_{batch}", *SHORT,
                                    "--data.batch_size_per_device", batch, "--eval.batch_size_per_device", evaluated,
                                    "--model.head", head, "--model.head_options", "{}", *MODES[mode]))
             for head, batch, evaluated in plain]  # fmt: skip
    for (head, _, evaluated), measured in zip(plain, pretended(tmp_path, cases), strict=True):
        step, batch = (limit + (head == "vctree") for limit in GRAPHS[mode])  # its trees
        launches = LAUNCHES * (1 + (head == "vctree"))  # level by level along the trees
        assert_few_waits(measured, step, batch, -(-10 // evaluated), launches)


RF_DETR = {"--model.architecture": "rf_detr", "--model.encoder_layers": 4, "--model.d_model": 32, "--model.heads": 2,
           "--model.ffn_dim": 32, "--model.decoder_layers": 2, "--model.num_queries": 20}  # fmt: skip


@pytest.mark.slow
@pytest.mark.every_script
@pytest.mark.parametrize("script", [each for each in SCRIPTS if each.name in MASKED], indirect=True)
def test_masks_add_no_wait_to_a_step(settings, script, tmp_path):
    given = pairs(settings("--run.output_dir", tmp_path, "--run.name", "masks", *SHORT, "--model.masks", "true"))
    if script.name == "train_detr":
        given = {key: value for key, value in given.items() if key != "--config"} | RF_DETR
        given |= {"--data.image_size": 112}
    (measured,) = pretended(tmp_path, [(script.name, flat(given))])
    more = MASKED[script.name]
    assert_few_waits(measured, STEP[script.name], EVALUATED[script.name] + more, 4, 2 * LAUNCHES)


@pytest.mark.slow
def test_the_whole_family_runs_on_a_device(settings, script, tmp_path):
    cases = []
    for name in FAMILY:
        given = pairs(settings("--run.output_dir", tmp_path, "--run.name", name, "--data.image_size", 128, *SHORT))
        given |= {"--model.architecture": name} | SMALL
        if name in ("ecdet", "lw_detr"):
            del given["--model.backbone"]
        cases.append((script.name, flat({key: value for key, value in given.items() if key != "--config"})))
    auto = settings("--run.output_dir", tmp_path, "--run.name", "auto", *SHORT, "--run.precision", "auto")
    names = [*FAMILY, "auto"]
    for name, measured in zip(names, pretended(tmp_path, [*cases, (script.name, auto)]), strict=True):
        launches = LAUNCHES * (1 + (name in ("ecdet", "lw_detr")))  # transformers of 12 and 10 layers
        batch = EVALUATED[script.name] + (name == "lw_detr")  # its proposals are matched too
        assert_few_waits(measured, STEP[script.name], batch, 4, launches)
    run = yaml.safe_load((tmp_path / "auto" / "config.yaml").read_text())["run"]
    assert (run["precision"], run["tf32"]) == ("bf16", True), "where a device has both"


@pytest.mark.slow
def test_the_bench_of_a_gpu_from_its_first_line_to_the_table(tmp_path):
    """`make gpu` with small sizes: in each of its processes the device is there from the start of Python."""
    site = tmp_path / "site"
    site.mkdir()
    here = ROOT / "tests" / "scripts"
    (site / "sitecustomize.py").write_text(
        f"import pathlib, sys\nsys.path.append({str(here)!r})\nimport pretended_device\n"
        f"pretended_device.install(pathlib.Path({str(ROOT)!r}))\n"
    )
    env = {key: value for key, value in os.environ.items() if key != "ACCELERATE_USE_CPU"}
    env |= {"PYTHONPATH": str(site), "DETECTION_TOOLKIT_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, ROOT / "scripts" / "benchmark.py", "--only", "gpu", "--quick", "--out", tmp_path / "gpu"]
    command += ["--items", "bf16", "train_ssd, resumed", "parity", "moves", "train_ssd, whole", "overlap"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env)
    assert ended.returncode == 0, ended.stderr[-6000:]
    rows = {row["name"]: row for row in json.loads((tmp_path / "gpu" / "rows.json").read_text())["rows"]}
    assert not [row for row in rows.values() if row["value"] is None], ended.stderr[-6000:]
    for script in STEP:
        assert rows[f"gpu, {script}, bf16, speed"]["value"] > 0
        # waits inside transformers are counted too
        assert rows[f"gpu, {script}, bf16, waits"]["value"] <= STEP[script] + 1, rows[f"gpu, {script}, bf16, waits"]
        assert abs(rows[f"gpu, {script}, parity, loss of step 1, GPU / CPU - 1"]["value"]) <= 1e-3
    assert {name for name in rows if "loop, speed" in name or "Trainer, speed" in name} == {
        "gpu, train_detr, bf16, transformers' Trainer, speed",
        "gpu, train_detr, bf16, bare loop, speed",
        "gpu, train_faster_rcnn, bf16, torchvision's reference loop, speed",
    }
    assert rows["gpu, train_ssd, resumed, tensors that differ, after a kill"]["value"] == 0
    assert rows["gpu, moves, CPU, GPU, CPU: largest difference of a loss"]["value"] <= 1e-4
    with_nan = rows["gpu, train_ssd, whole, fp16, training with a NaN"]["unit"]
    assert "finite" in with_nan and "AP" in rows["gpu, train_ssd, whole, fp16, evaluate"]["unit"]
    assert "| gpu, train_sgg, bf16, speed |" in (tmp_path / "gpu" / "table.md").read_text(encoding="utf-8")
    assert (tmp_path / "gpu" / "log.txt").stat().st_size > 0


@pytest.mark.slow
def test_a_run_goes_from_the_cpu_to_a_device_back_behind_a_nan_and_to_the_cpu(server, script, settings, tmp_path):
    def args(steps):
        return settings("--run.output_dir", tmp_path, "--run.max_steps", steps, "--run.resume", "latest",
                        "--run.resume_schedule", "new", "--run.epochs", 9, "--run.save_every", 1,
                        "--run.on_nonfinite", "rollback")  # fmt: skip

    server.run(script, args(2)).ok()
    pretended(tmp_path, [(script.name, args(4))], [{"nan": "loss", "window": 2}])
    ended = server.run(script, args(6)).ok()
    assert [row["step"] for row in training_rows(ended.folder)] == [1, 2, 3, 4, 5, 6]
    assert list((ended.folder / "nan").glob("step_*"))
