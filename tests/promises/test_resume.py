"""A training that was killed, signalled or out of disk goes on to the bits of the one that nothing happened to.

Each fault is shown with one training, and each kind of training with one or two faults. Kills at drawn moments and at
every write have files of their own beside this one.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import datasets
import psutil
import pytest
import yaml
from launching import (
    EVALUATION,
    MICRO_BATCH,
    REPORT,
    SCRIPTS,
    TORCHRUN,
    Result,
    Script,
    assert_same_run,
    finish,
    kill,
    rows,
    run_folder,
    small_settings,
    start,
    training_rows,
)
from places import ROOT, SMALL_CONFIGS, SUPPORT

from toolkit.data.formats import open_dataset
from toolkit.models import build_detector
from toolkit.run.checkpoint import newest_valid
from toolkit.run.folder import prepare_run_folder
from toolkit.run.status import FolderLock, read_status
from toolkit.tools.writers import write_folder

PROGRAMS = ROOT / "scripts"
DETR, YOLOV3, FASTER_RCNN, SCENE_GRAPHS, SSD = SCRIPTS


class Fault(NamedTuple):
    """A signal before call number `call` of `at`, counted from where the run was resumed, and the last step it trains.

    SIGKILL goes to all processes, and the run dies. Others go to the last one, and the run saves and ends with 85.
    """

    at: str
    call: int
    step: int
    signal: str = "SIGKILL"

    def planted(self, processes: int) -> dict:
        rank = 0 if self.signal == "SIGKILL" else processes - 1
        return {"signal": self.signal, "at": self.at, "call": self.call, "rank": rank}


# One run after the other ends before one of these. Of six steps those at 2, 4 and 6 are evaluated, and 3 and 6 saved.
GATHERING = "toolkit.evaluation.predict_dataset:gather_by_image"
STOP = "toolkit.run.session:Session.stop_if_asked"
FAULTS = (
    Fault(GATHERING, 1, 2),
    Fault(GATHERING, 1, 2),  # again: an evaluation that takes too much memory costs none of the steps before it
    Fault(EVALUATION, 11, 4),
    Fault("open */.tmp-step_*/MANIFEST.json", 1, 4),  # evaluated, which the checkpoint does not say yet
    Fault(MICRO_BATCH, 2, 4),  # one of the two micro-batches of a step is done
    Fault(GATHERING, 1, 6, "SIGTERM"),  # the last evaluation is made by the next start
)
MORE_FAULTS = (  # tests/run/test_checkpoint.py kills before every write of a checkpoint
    Fault(MICRO_BATCH, 2, 0),  # nothing is saved yet
    Fault("safetensors.torch:save_file", 2, 2),  # the weights are written, their average is not
    Fault("os.symlink step_*", 1, 2),  # the first checkpoint has its name, and nothing leads to it
    Fault("toolkit.run.loop:note_step", 1, 2),  # weights are updated, their average and the schedule are not
    Fault("toolkit.run.validation:note_metric", 1, 4),  # evaluated, and nothing is written down
    Fault("toolkit.run.validation:save_outcome", 1, 4),  # its row is written, the checkpoint lacks the metric
    Fault("toolkit.run.checkpoint:_put_in_place", 1, 4),  # the checkpoint with the metric lacks its name
    Fault("toolkit.run.checkpoint:_replace_link", 1, 4),  # it has its name, and no link leads to it
    Fault("toolkit.run.recovery:RunGuard.accepts", 2, 5),  # gradients are complete, the update is not made
    Fault(GATHERING, 2, 6),
)
OF_AN_EXTENSION = (  # from step 6 to step 14; the evaluation at step 10 reduces the learning rate
    Fault(MICRO_BATCH, 2, 6),  # nothing is saved yet
    Fault(GATHERING, 5, 12),  # of two in each evaluation
)
OF_THREE_PROCESSES = (
    Fault(MICRO_BATCH, 2, 0),
    Fault("toolkit.run.validation:note_metric", 1, 2),
    Fault("toolkit.run.recovery:RunGuard.accepts", 2, 3),
    Fault(GATHERING, 1, 4),
)
SIGNALS = (
    Fault(MICRO_BATCH, 2, 1, "SIGTERM"),
    Fault(EVALUATION, 3, 2, "SIGUSR1"),
    Fault(EVALUATION, 10, 4, "SIGTERM"),  # the evaluation at step 2 is made again first
    Fault(MICRO_BATCH, 2, 5, "SIGINT"),
    Fault(STOP, 3, 6, "SIGTERM"),  # the last evaluation is over, and is not made again
    Fault(STOP, 5, 6, "SIGTERM"),  # final/ and the report are written
)
SEQUENCES = [
    pytest.param(1, FAULTS, id="1"),
    pytest.param(1, MORE_FAULTS, id="1, more", marks=pytest.mark.slow),
    pytest.param(2, SIGNALS, id="2, signals", marks=pytest.mark.slow),
    pytest.param(3, OF_THREE_PROCESSES, id="3", marks=pytest.mark.slow),
]


def of_shapes(data: Path, folder: Path) -> str:
    """Return no settings: the data are those that all runs have."""
    return ""


def of_shards(data: Path, folder: Path) -> str:
    """Return the settings for streaming the data from three shards a split."""
    shards = folder / "shards" / "data"
    shards.mkdir(parents=True)
    for split, name in (("train", "train"), ("val", "validation")):
        table = open_dataset(split, path=data, cache_dir=folder / "cache")
        write_folder(table, folder / "whole", split, "hub")
        (whole,) = (folder / "whole" / "data").glob(f"{name}-*")
        images = datasets.Dataset.from_parquet(str(whole), cache_dir=str(folder / "hf"))
        for index in range(3):
            shard = images.shard(3, index)
            shard.to_parquet(str(shards / f"{split}-{index:05d}-of-00003.parquet"), batch_size=2)
    return f"{NAMED_SPLITS} --data.path {folder}/shards --data.streaming true"


def of_two_sets(data: Path, folder: Path) -> str:
    """Return the settings for the data together with a copy that lacks one class and has another one."""
    other = shutil.copytree(data, folder / "other")
    for path in (other / "annotations").iterdir():
        document = json.loads(path.read_text())
        removed = document["categories"].pop()
        document["categories"][0]["name"] = "new"
        boxes = [box for box in document["annotations"] if box["category_id"] != removed["id"]]
        kept = {"images": document["images"], "categories": document["categories"], "annotations": boxes}
        path.write_text(json.dumps(kept))
    return f"{NAMED_SPLITS} --data.path [{data},{other}] --data.shares [3,1]"


def of_saved_detector(data: Path, folder: Path) -> str:
    """Return the settings for scene graphs on a frozen detector, whose folder is removed before the run goes on."""
    options = yaml.safe_load(FASTER_RCNN.config.read_text())["model"]
    table = open_dataset("train", path=data, cache_dir=folder / "cache")
    detector = build_detector("faster_rcnn", class_names=table.class_names, pretrained_backbone=False, **options)
    detector.save_final(folder / REMOVED, table.categories)
    return f"--model.detector {folder}/{REMOVED} --model.backbone null --model.detector_options null"


class Kind(NamedTuple):
    """A training with a state of its own kind, the calls before which it is killed, and what it prints."""

    script: Script
    settings: str
    processes: int
    kills: tuple[tuple[str, int], ...]
    data: Callable[[Path, Path], str] = of_shapes
    says: str = ""


REMOVED = "removed"
NAMED_SPLITS = "--data.train train --data.val val --data.format shapes"
EVERY_AUGMENTATION = """
--data.augment '[{"RandomVerticalFlip": {"p": 0.5}}, {"RandomPhotometricDistort": {"p": 0.5}}]' --data.zoom_out 2
--data.repeat_factor 0.9 --data.iou_crop true --data.multi_scale [64,96] --data.multi_scale_pixels false
--data.mosaic 0.5 --data.batch_mixup 0.4 --data.copy_blend 0.6 --data.plain_epochs 1
--data.plain_without [mosaic,mixup,batch_mixup,copy_blend,augment,zoom_out,iou_crop,multi_scale]
"""
STREAMED = "--data.mosaic 0 --data.mixup false --data.multi_scale_pixels false"
MASKS = "--model.masks true --model.mask_convs 1 --model.mask_channels 8"
TILES = "--data.tile 40 --data.tile_visible 0.4 --data.tile_empty 0.5"
PLATEAU = "--schedule.name plateau --schedule.plateau_patience 1 --schedule.max_decays 9"
EGTR = f"--config {SMALL_CONFIGS}/egtr.yaml"
STEP_4 = (MICRO_BATCH, 4)
TWICE = (STEP_4, (MICRO_BATCH, 3))  # the second time in step 6, the first one of the epoch without mixing
AND_EVALUATION = (STEP_4, (EVALUATION, 1))
KINDS = {
    "every augmentation": Kind(DETR, EVERY_AUGMENTATION, 1, TWICE),
    "streamed shards": Kind(DETR, STREAMED, 2, (STEP_4,), of_shards, "train: 18 images ("),
    "two sets": Kind(YOLOV3, "", 2, (STEP_4,), of_two_sets, "does not label new"),
    "masks": Kind(FASTER_RCNN, MASKS, 2, AND_EVALUATION, says="best segm_AP"),
    "scene graphs": Kind(SCENE_GRAPHS, EVERY_AUGMENTATION, 2, TWICE),
    "scene graphs in one stage": Kind(SCENE_GRAPHS, EGTR, 2, (STEP_4,)),
    "scene graphs on a detector": Kind(SCENE_GRAPHS, PLATEAU, 1, (STEP_4,), of_saved_detector, "of the detector"),
    "tiles": Kind(SSD, TILES, 2, AND_EVALUATION, says="tiles of at most 40 x 40 px"),
    "masks in tiles": Kind(FASTER_RCNN, f"{MASKS} {TILES}", 2, AND_EVALUATION, says="best segm_AP"),
}
OF_KINDS = """
--run.resume latest --run.max_steps 6 --run.save_every 2 --run.eval_every 3 --run.keep 1 --data.workers 2
--eval.batch_size_per_device 2
"""

# Moment -> function or audit event, its call, and the exit code when the disk is full then.
MOMENTS = {
    "start": ("os.mkdir */run", 1, 2),
    "settings": ("open */.tmp-config.yaml*", 1, 2),
    "row": ("toolkit.run.metrics_log:MetricsLog.write", 2, 2),
    "pictures": ("open */pictures/step_*", 1, 2),
    "predictions": ("open */.tmp-predictions.json*", 1, 2),
    "first checkpoint": ("open */.tmp-step_*/MANIFEST.json", 1, 2),
    "metric": ("toolkit.run.saving:replace_state", 1, 2),  # of the evaluation of a checkpoint that stands
    "later checkpoint": ("safetensors.torch:save_file", 4, 2),
    "final": ("os.mkdir */final", 1, 2),
    "report": (REPORT, 1, 0),
    "end": ("toolkit.run.log:Log.close", 1, 0),
}
DISKS = [
    ("full", "first checkpoint"),
    *(pytest.param("full", moment, marks=pytest.mark.slow) for moment in MOMENTS if moment != "first checkpoint"),
    pytest.param("inodes", "first checkpoint", marks=pytest.mark.slow),
    pytest.param("removed", "row", marks=pytest.mark.slow),
    pytest.param("removed", "later checkpoint", marks=pytest.mark.slow),
    pytest.param("read-only", "start", marks=pytest.mark.slow),
]

ACCELERATE = "accelerate.commands.launch --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no"
TORCHRUN_2 = "torch.distributed.run --nproc_per_node 2"
# In the first seconds under a real launcher: moment, who gets which signals, and the state that status.json has then.
LAUNCHES = [
    (ACCELERATE, "imports", "launcher", "SIGTERM", "done"),  # which hands no signal on
    (ACCELERATE, "before the lock", "group", "SIGINT SIGINT", "preempted"),
    (ACCELERATE, "with the lock", "rank", "SIGTERM", "preempted"),
    (TORCHRUN_2, "imports", "rank", "SIGTERM", "preempted"),
    (TORCHRUN_2, "before the lock", "launcher", "SIGTERM", "preempted"),
    (TORCHRUN_2, "with the lock", "group", "SIGTERM", "preempted"),
]

# What a resume is refused for, and what the sentence says.
REFUSED = {
    "--optim.name sgd": "optim.name adamw -> sgd: refused",
    "--optim.no_weight_decay_on_norm_and_bias false": "optim.no_weight_decay_on_norm_and_bias",
    "--model.d_model 64": "model.d_model 32 -> 64",
    "--schedule.name plateau": "schedule.name",
    "--data.max_train_images 9": "has 9 samples",
    "--data.tile 32": "data.tile",
    "--eval.metric_for_best nonsense": "no such metric",
    "--eval.metric_for_best nonsense --run.eval_only true": "no such metric",
    "--run.resume nowhere/at/all": "does not exist",
    "--run.resume never": "--run.resume latest",
}


def assert_goes_on(server, script: Script, args: list[str], processes: int, faults, reference: Path) -> Result:
    """End a run by each of the faults in turn, and then let it go on to its end."""
    checkpoints = run_folder(args) / "checkpoints"
    for fault in faults:
        saved, _ = newest_valid(checkpoints)
        stopped = server.run(script, args, processes, [fault.planted(processes)])
        assert f"fault: {fault.signal} before" in stopped.text, f"ended before {fault.at}\n{stopped.text}"
        assert "Traceback" not in stopped.text, stopped.text
        assert ("Resuming from" in stopped.text) == (saved is not None), stopped.text
        trained = stopped.trained if fault.step else []
        assert trained == [*range(1, fault.step + 1)], fault
        killed = fault.signal == "SIGKILL"
        assert stopped.code == (-9 if killed else 85), stopped.text
        assert stopped.status["state"] == ("running" if killed else "preempted")
        if not killed:
            assert stopped.status["step"] == fault.step
            assert (checkpoints / "latest").resolve().name == f"step_{fault.step:06d}"
    resumed = server.run(script, [*args, "--run.seed", "7"], processes).ok()  # the seed of the checkpoint goes on
    assert "Resuming from" in resumed.text
    assert resumed.status["state"] == "done"
    assert_same_run(resumed.folder, reference)
    assert not list(resumed.folder.rglob(".tmp-*"))
    return resumed


@pytest.mark.parametrize(("processes", "faults"), SEQUENCES)
def test_run_goes_on_to_the_bit_after_each_fault(server, script, resumable, processes, faults):
    args, reference = resumable(processes)
    args = [*args, "--run.name", f"broken_{len(faults)}"]
    resumed = assert_goes_on(server, script, args, processes, faults, reference)
    assert ("evaluation at step 6" in resumed.text) == (faults != SIGNALS)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_training_goes_on_to_the_bit(server, data, tmp_path, name):
    kind = KINDS[name]
    place = f"--run.output_dir {tmp_path} --data.batch_size_per_device {4 // kind.processes}"
    args = small_settings(kind.script, data, f"{place} {OF_KINDS} {kind.settings} {kind.data(data, tmp_path)}")
    reference = server.run(kind.script, [*args, "--run.name", "reference"], kind.processes).ok()
    assert kind.says in reference.text
    for at, call in kind.kills:
        server.run(kind.script, args, kind.processes, [kill(call, at)]).killed()
    shutil.rmtree(tmp_path / REMOVED, ignore_errors=True)
    resumed = server.run(kind.script, args, kind.processes).ok()
    assert "Resuming from" in resumed.text
    assert_same_run(resumed.folder, reference.folder)


# ---- signals ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def endless(settings, tmp_path):
    """The arguments of a run that ends only because of something else."""
    return settings(f"--run.output_dir {tmp_path} --run.epochs 1000 --run.eval_every 0 --run.save_every 1")


@pytest.fixture
def preempted(tmp_path):
    """The folder of a run that says that it was preempted."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "status.json").write_text('{"state": "preempted"}')
    return folder


def test_second_interrupt_stops_at_once(server, script, settings, tmp_path):
    accepts = "toolkit.run.recovery:RunGuard.accepts"
    faults = [
        {"signal": "SIGINT", "at": MICRO_BATCH, "call": 3},
        {"signal": "SIGINT", "at": accepts, "call": 3, "wait_s": 0.3},
    ]
    ended = server.run(script, settings(f"--run.output_dir {tmp_path}"), 1, faults)
    assert ended.code == 130
    assert ended.status["state"] == "failed"
    assert ended.trained == [1, 2]
    assert not (ended.folder / "checkpoints" / "latest").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "moment", "whom", "signals", "state"), LAUNCHES)
def test_signal_in_the_first_seconds_ends_all_processes(
    script, settings, tmp_path, preempted, launcher, moment, whom, signals, state
):
    """What an earlier run says of itself stays, and the folder can be used at once."""
    args = settings(f"--run.output_dir {tmp_path} --run.resume latest --run.max_steps 1 --run.eval_every 0")
    signalled = [SUPPORT / "signalled.py", moment, whom, signals, script.path, *args]
    code, text = finish(start([sys.executable, "-m", *launcher.split(), *signalled]))  # until no process is left
    assert f"to {whom}" in text, text
    assert code != 0, text
    assert read_status(preempted)["state"] == state, text
    if moment == "imports" and state == "preempted":
        assert [path.name for path in preempted.iterdir()] == ["status.json"]
    with FolderLock() as lock:
        prepare_run_folder(tmp_path, "run", "latest", lock)


def to_last_rank(sent: signal.Signals, file: Path) -> Callable[[list[int]], None]:
    """Return what sends a signal to the last rank below a launcher, once the run has written a file."""

    def send(pids: list[int]) -> None:
        agent = psutil.Process(pids[0])
        while agent.status() != psutil.STATUS_ZOMBIE and not (file.exists() and file.stat().st_size):
            time.sleep(0.02)
        os.kill(agent.children()[-1].pid, sent)

    return send


def test_signal_to_one_rank_under_torchrun_is_told_in_status(server, endless, script, tmp_path):
    meanwhile = to_last_rank(signal.SIGUSR1, tmp_path / "run" / "metrics.jsonl")
    faults = [{"skip": REPORT}]
    ended = server.run(TORCHRUN, ["2,0", script.path, *endless], faults=faults, meanwhile=meanwhile)
    assert ended.code == 1, "torchrun has no other one"
    assert ended.status["state"] == "preempted"
    assert ended.status["exit_code"] == 85
    assert ended.trained[-1] == ended.status["step"]
    assert (ended.folder / "checkpoints" / "latest").resolve().name == f"step_{ended.status['step']:06d}"


@pytest.mark.slow
def test_torchrun_restarts_from_the_newest_checkpoint_after_a_killed_rank(server, script, resumable):
    args, reference = resumable(2)
    args = [*args, "--run.name", "elastic"]
    meanwhile = to_last_rank(signal.SIGKILL, run_folder(args) / "checkpoints" / "latest")
    ended = server.run(TORCHRUN, ["2,2", script.path, *args], meanwhile=meanwhile).ok()
    assert ended.text.count("Resuming from") == 1, ended.text
    assert ended.status["state"] == "done"
    assert_same_run(ended.folder, reference)


def test_closed_terminal_ends_a_run_with_85(hangups, script, endless, tmp_path):
    process = start([sys.executable, script.path, *endless], {"PYTHONUNBUFFERED": "1"})
    assert any("step 2/" in line for line in process.stdout)
    process.stdout.close()
    os.kill(process.pid, signal.SIGHUP)
    code, _ = finish(process)
    assert code == 85
    assert read_status(tmp_path / "run")["state"] == "preempted"


def test_second_run_is_refused_while_the_first_one_lives(server, script, endless):
    args = [*endless, "--data.workers", "2"]
    first = start([sys.executable, script.path, *args], {"PYTHONUNBUFFERED": "1"})
    try:
        assert any("step 2/" in line for line in first.stdout)
        for more in ("--run.resume never", "--run.resume latest --run.eval_only true"):
            refused = server.run(script, [*args, *more.split()])
            refused.refused(f"in use by process {first.pid} on {socket.gethostname()}, since 20")
            assert refused.status["state"] == "running"
            assert first.poll() is None
    finally:
        first.kill()
        finish(first)
    # Its workers outlive it for seconds, and do not hold the folder.
    short = "--run.resume latest --run.resume_schedule new --run.max_steps 1"
    assert "Resuming from" in server.run(script, [*args, *short.split()]).ok().text


# ---- disks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("how", "moment"), DISKS)
def test_run_goes_on_when_the_disk_has_room_again(server, script, resumable, mount, tmp_path, how, moment):
    args, reference = resumable(1)
    disk = mount(tmp_path / "disk", "-t", "tmpfs", "-o", "size=512m,nr_inodes=400", "none")
    args += f"--run.output_dir {disk} --run.name run --eval.pictures 2 --data.workers 0".split()
    folder = disk / "run"
    at, call, code = MOMENTS[moment]
    fault = {"disk": how, "folder": str(folder if how == "removed" else disk), "at": at, "call": call}
    ended = server.run(script, args, faults=[fault], whole=moment == "report")
    assert ended.code == code, ended.text
    assert "Traceback" not in ended.text, ended.text
    if code == 0:  # what a training can do without
        assert "the run goes on without" in ended.text or moment == "end"
        assert ended.status["state"] == "done"
    else:
        assert re.search("error: .*([Nn]o space|removed|No such file|Read-only)", ended.text), ended.text
        if (folder / "status.json").exists() and (folder / "status.json").stat().st_size:
            assert ended.status["state"] == "bad_input"
    newest, broken = newest_valid(folder / "checkpoints")
    assert broken == []
    if how != "removed" and moment in ("later checkpoint", "final", "report", "end"):
        assert newest is not None
    subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    for path in disk.glob(".filler*"):
        path.unlink()
    again = server.run(script, args).ok()
    assert again.status["state"] == "done"
    assert (again.folder / "final").is_dir()
    if how != "removed":  # the rows before are gone with the folder
        assert_same_run(again.folder, reference)


@pytest.mark.slow
def test_read_only_run_and_data_are_read_and_refused_for_writing(server, script, data, whole, tmp_path, mount):
    run = shutil.copytree(whole, tmp_path / "old", symlinks=True)
    pictures = shutil.copytree(data, tmp_path / "data")
    for folder in (run, pictures):
        mount(folder, "--bind", folder)
        mount(folder, "-o", "remount,bind,ro")
    place = f"--run.output_dir {tmp_path} --run.max_steps 1"
    server.run(script, small_settings(script, pictures, f"{place} --run.name new")).ok()
    server.run(PROGRAMS / "evaluate.py", f"{run}").ok()
    server.run(PROGRAMS / "predict.py", f"{run} {pictures}/val --out {tmp_path}/found --format json").ok()
    writing = {
        "report": f"{run}",
        "export": f"{run} --out {run}/new",
        "publish": f"{run}",
        script.name: small_settings(script, data, f"{place} --run.name old --run.resume latest"),
    }
    for program, args in writing.items():
        ended = server.run(PROGRAMS / f"{program}.py", args).refused("Read-only file system", str(run))
        assert ended.text.count("error: ") == 1, ended.text


# ---- a run that is finished, and what is refused ---------------------------------------------------------------------


@pytest.fixture
def finished(resumable, tmp_path):
    """(arguments, folder) of a copy of a finished run."""
    args, reference = resumable(1)
    folder = shutil.copytree(reference, tmp_path / "copy", symlinks=True)
    return [*args, *f"--run.output_dir {tmp_path} --run.name copy".split()], folder


def contents(folder: Path) -> dict:
    """Return every file and link of a folder, byte for byte."""
    paths = [path for path in folder.rglob("*") if path.is_symlink() or path.is_file()]
    return {path: os.readlink(path) if path.is_symlink() else path.read_bytes() for path in paths}


def test_finished_run_is_not_logged_twice_and_its_links_are_mended(server, script, finished):
    args, folder = finished
    before = rows(folder)
    checkpoints = folder / "checkpoints"
    best = os.readlink(checkpoints / "best")
    (checkpoints / "best").unlink()
    (checkpoints / "latest").unlink()
    again = server.run(script, args).ok()
    assert again.status["state"] == "done"
    assert "evaluation at step" not in again.text
    assert rows(folder) == before
    assert os.readlink(checkpoints / "latest") == "step_000006"
    assert os.readlink(checkpoints / "best") == best


def test_changed_settings_are_said_and_used_with_a_new_schedule(server, script, finished):
    """tests/run/test_settings_file.py has each setting."""
    args, folder = finished
    before = rows(folder)
    first = (folder / "config.yaml").read_text()
    args += "--run.epochs 3 --run.max_steps 9 --run.seed 7 --run.keep 3 --optim.lr 5e-4 --schedule.name linear".split()
    args += "--schedule.warmup_steps 0 --schedule.final_factor 0".split()
    text = server.run(script, args).ok().text
    assert re.search("optim.lr .* -> 0.0005: ignored, .*--run.resume_schedule new uses it", text), text
    assert "run.keep 1 -> 3: used" in text
    assert re.search("the run is finished at step 6 of 6.*--run.resume_schedule new goes on to step 9", text), text
    assert rows(folder) == before
    assert (folder / "config.yaml").read_text() == first
    second = (folder / "config_2.yaml").read_text()
    assert "# run.keep 1 -> 3: used" in second
    now = yaml.safe_load(second)
    assert now["optim"] == yaml.safe_load(first)["optim"]
    assert (now["run"]["keep"], now["run"]["seed"], now["run"]["max_steps"]) == (3, 0, None)

    server.run(script, [*args, "--run.resume_schedule", "new"]).ok()
    assert rows(folder)[: len(before)] == before
    more = training_rows(folder)[6:]
    assert [row["step"] for row in more] == [7, 8, 9]
    assert [row["train/lr/main"] for row in more] == pytest.approx([5e-4 * (1 - step / 9) for step in (6, 7, 8)])
    assert yaml.safe_load((folder / "config_3.yaml").read_text())["optim"]["lr"] == 5e-4


def test_an_extension_goes_on_to_the_bit_by_the_same_command(server, script, finished, tmp_path):
    args, folder = finished
    args += "--run.resume_schedule new --run.epochs 9 --run.max_steps 14 --schedule.name plateau".split()
    args += "--schedule.plateau_threshold 1 --schedule.plateau_patience 1 --schedule.max_decays 9".split()
    whole = shutil.copytree(folder, tmp_path / "whole", symlinks=True)
    server.run(script, [*args, "--run.name", "whole"]).ok()
    assert_goes_on(server, script, args, 1, OF_AN_EXTENSION, whole)
    before = rows(whole)
    server.run(script, [*args, "--run.name", "whole"]).ok()
    assert rows(whole) == before, "it is finished"


def test_refused_resume_changes_nothing(server, script, finished):
    args, folder = finished
    before = contents(folder)
    for more, message in REFUSED.items():
        text = server.run(script, [*args, *more.split()]).refused().text
        first, *others = text[text.index("error:") :].strip().splitlines()
        assert message in first, text
        assert len(others) <= 4, text
        assert contents(folder) == before, more
    weights = list(folder.glob("checkpoints/step_*/model.safetensors"))
    for path in weights:
        os.truncate(path, 100)
    before = contents(folder)
    assert server.run(script, args).refused().text.count("truncated") == len(weights)
    assert contents(folder) == before


def test_lost_rows_are_said_and_kept(server, script, finished):
    args, folder = finished
    path = folder / "metrics.jsonl"
    text = path.read_text()
    damaged = text[: text.index("\n") + 9]
    path.write_text(damaged)
    said = server.run(script, args).ok().text
    assert "readable rows of the" in said
    assert "metrics.jsonl.damaged" in said
    assert (folder / "metrics.jsonl.damaged").read_text() == damaged
    assert path.read_text() in text
    path.unlink()
    assert "metrics.jsonl is gone" in server.run(script, args).ok().text


def test_annotations_edited_before_a_resume_are_told(server, script, settings, data, tmp_path):
    shutil.copytree(data, tmp_path / "data")
    file = tmp_path / "data" / "annotations" / "train.json"
    args = settings(f"--run.output_dir {tmp_path} --data.train {file} --run.resume latest --run.max_steps 1")
    server.run(script, args).ok()
    again = [*args, "--run.resume_schedule", "new", "--run.max_steps"]
    changed = "the training data are not those of the checkpoint"
    assert changed not in server.run(script, [*again, "2"]).ok().text
    document = json.loads(file.read_text())
    document["annotations"][0]["bbox"][2] /= 2
    file.write_text(json.dumps(document))
    edited = server.run(script, [*again, "3"]).ok().text
    assert changed in edited
    assert "with other boxes or labels (" in edited
    assert "validation data are not" not in edited
    gone = document["images"].pop()
    for key in ("annotations", "rel_annotations"):
        document[key] = [entry for entry in document[key] if entry["image_id"] != gone["id"]]
    file.write_text(json.dumps(document))
    server.run(script, args).refused(f"of the images 1 gone ({gone['file_name']} ")
