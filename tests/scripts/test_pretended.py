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
from launching import CPU, ROOT, SCRIPTS, Script, training_rows

# Largest numbers of waits. Of a step: one is the read of everything that it must know, one the matcher's; Faster R-CNN
# does not know beforehand how many proposals it has, and on which levels. Of an evaluated batch, losses included.
STEP = {"train_detr": 3, "train_yolov3": 1, "train_faster_rcnn": 3, "train_sgg": 1, "train_ssd": 1}
EVALUATED = {"train_detr": 2, "train_yolov3": 2, "train_faster_rcnn": 2, "train_sgg": 1, "train_ssd": 1}
EVALUATION = 4  # of a whole evaluation, beside its batches: losses are read, anchors are moved once
LAUNCHES = 40 * 32  # of an evaluated batch, 40 for each of as many images as it has by default; however many it has
MODES = {mode: ["--model.mode", mode, "--eval.metric_for_best", "R@20"] for mode in ("predcls", "sgcls", "sgdet")}
GRAPHS = {"predcls": (1, 1), "sgcls": (3, 2), "sgdet": (6, 3)}  # a step and an evaluated batch, detector trained too
HEADS = ("imp", "vctree", "transformer", "vtranse", "causal", "penet", "react")
FAMILY = ("conditional_detr", "deformable_detr", "dab-detr", "d_fine", "deimv2", "detr", "yolos")
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
    ended = subprocess.run(command, capture_output=True, text=True, timeout=1500, cwd=tmp_path,
                           env=_environment(tmp_path))  # fmt: skip
    found = [json.loads(line[6:]) for line in ended.stdout.splitlines() if line.startswith("FOUND ")]
    assert len(found) == len(cases), f"{ended.stdout[-3000:]}\n{ended.stderr[-6000:]}"
    assert [each["code"] for each in found] == [0] * len(cases), ended.stderr[-6000:]
    return found


def _environment(tmp_path: Path) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k != "ACCELERATE_USE_CPU"}
    return kept | {"OMP_NUM_THREADS": CPU["OMP_NUM_THREADS"], "DETECTION_TOOLKIT_CACHE": str(tmp_path / "cache")}


def counted(part: dict) -> int:
    """Waits without those inside transformers."""
    return sum(count for place, count in part["places"].items() if "transformers/" not in place)


def assert_few_waits(found: dict, step: int, batch: int, batches: int, launches: int = LAUNCHES) -> None:
    assert counted(found["step"]) <= step, found["step"]["places"]
    assert counted(found["evaluation"]) <= batch * batches + EVALUATION, found["evaluation"]["places"]
    assert found["evaluation"]["launches"] <= launches * batches, found["evaluation"]["launches_at"]
    assert not found["step"]["unpinned"], "pageable memory is copied twice"


@pytest.mark.slow
@pytest.mark.every_script
def test_waits_do_not_depend_on_the_batch(script: Script, settings, tmp_path):
    """Nor on the precision; in two micro-batches a step waits twice as often, but for its one read."""

    def case(name, *args):
        own_mode = MODES["predcls"] if script.name == "train_sgg" else ()
        return script.name, settings("--run.output_dir", tmp_path, "--run.name", name, *SHORT, *own_mode, *args)

    cases = {"small": [], "large": ["--data.batch_size_per_device", 9, "--eval.batch_size_per_device", 5],
             "bf16": ["--run.precision", "bf16"], "fp16": ["--run.precision", "fp16"],
             "twice": ["--optim.accumulation_steps", 2]}  # fmt: skip
    all_found = pretended(tmp_path, [case(name, *args) for name, args in cases.items()])
    found = dict(zip(cases, all_found, strict=True))
    limits = STEP[script.name], EVALUATED[script.name]
    for name, batches in (("small", 4), ("large", 2), ("bf16", 4)):
        assert_few_waits(found[name], *limits, batches)
    assert found["small"]["step"]["places"] == found["large"]["step"]["places"]
    # the scaler's; and where gradients overflow, whether the state is broken, and whether only their norm is
    assert_few_waits(found["fp16"], limits[0] + 3, limits[1], 4)
    assert_few_waits(found["twice"], 2 * limits[0] - 1, limits[1], 4)


@pytest.mark.slow
@pytest.mark.every_script
@pytest.mark.parametrize("script", [script for script in SCRIPTS if script.name == "train_sgg"], indirect=True)
@pytest.mark.parametrize("mode", MODES)
def test_scene_graphs_wait_as_often_however_large_the_batch(mode, settings, script, tmp_path):
    plain = [("motifs", 4, 3), ("motifs", 9, 5), *((head, 4, 3) for head in HEADS)]
    cases = [(script.name, settings("--run.output_dir", tmp_path, "--run.name", f"{head}_{batch}", *SHORT,
                                    "--data.batch_size_per_device", batch, "--eval.batch_size_per_device", evaluated,
                                    "--model.head", head, "--model.head_options", "{}", *MODES[mode]))
             for head, batch, evaluated in plain]  # fmt: skip
    for (head, _, evaluated), each in zip(plain, pretended(tmp_path, cases), strict=True):
        step, batch = (limit + (head == "vctree") for limit in GRAPHS[mode])  # its trees
        launches = LAUNCHES * (1 + (head == "vctree"))  # level by level along the trees
        assert_few_waits(each, step, batch, -(-10 // evaluated), launches)


@pytest.mark.slow
def test_the_whole_family_runs_on_a_device(settings, script, tmp_path):
    cases = []
    for name in FAMILY:
        args = settings("--run.output_dir", tmp_path, "--run.name", name, "--data.image_size", 128, *SHORT)
        kept = [pair for pair in zip(args[::2], args[1::2], strict=True) if pair[0] != "--config"]
        small = {} if name == "yolos" else SMALL
        chosen = [*kept, ("--model.architecture", name), *small.items()]
        cases.append((script.name, [part for pair in chosen for part in pair]))
    auto = settings("--run.output_dir", tmp_path, "--run.name", "auto", *SHORT, "--run.precision", "auto")
    for each in pretended(tmp_path, [*cases, (script.name, auto)]):
        assert_few_waits(each, STEP[script.name], EVALUATED[script.name], 4)
    run = yaml.safe_load((tmp_path / "auto" / "config.yaml").read_text())["run"]
    assert (run["precision"], run["tf32"]) == ("bf16", True), "where a device has both"


@pytest.mark.slow
@pytest.mark.every_script
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
