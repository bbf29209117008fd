"""Training is the same whatever number of micro-batches, processes and machines, with constant norms and no dropout."""

import json
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from launching import (
    SCRIPTS,
    assert_same_run,
    checkpoint_state,
    checkpoint_tensors,
    kill,
    small_settings,
    training_rows,
)
from places import ASSETS, SMALL_CONFIGS

DETR, YOLOV3, FASTER_RCNN, SCENE_GRAPHS, SSD = SCRIPTS


class Cut(NamedTuple):
    """How the 16 images of a step are cut, over what the process is told of its machines, and where it is killed."""

    processes: int
    batch: int
    accumulation: int
    env: dict = {}
    killed: bool = False  # with one process, in the third step of four


ON_TWO_MACHINES = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}  # as torchrun --nnodes 2 --nproc_per_node 1 says it
CUTS = {
    "micro-batches": Cut(1, 4, 4),
    "processes": Cut(2, 8, 1),
    "machines": Cut(2, 4, 2, ON_TWO_MACHINES),
    "resumed with more processes": Cut(2, 8, 1, killed=True),
}

# What makes nothing depend on the images that a batch happens to have, for each kind of training.
FROZEN = "--model.freeze norms"
NO_DROPOUT = "--model.head_options.dropout 0"
VCTREE = "--model.freeze detector_and_norms --model.mode sgcls --model.head vctree"
WEIGHED = "--loss.class_weights '{circle: 3.0, star: 0.2}'"
GROUP_NORMS = "--model.norm group --data.multi_scale []"
PUBLISHED_DETR = f"--config {SMALL_CONFIGS}/detr_published.yaml"
ALIKE = [
    (DETR, f"{PUBLISHED_DETR} {WEIGHED}"),
    (YOLOV3, f"{GROUP_NORMS} {WEIGHED}"),
    (FASTER_RCNN, f"{FROZEN} {WEIGHED}"),
    (FASTER_RCNN, f"{FROZEN} --model.masks true --model.mask_convs 1 --model.mask_channels 8"),
    (SCENE_GRAPHS, f"{FROZEN} {NO_DROPOUT}"),
    (SCENE_GRAPHS, f"{VCTREE} {NO_DROPOUT}"),
    (SCENE_GRAPHS, f"{FROZEN} --config {SMALL_CONFIGS}/egtr.yaml --model.detector_options.num_denoising 0"),
    (SSD, f"{GROUP_NORMS} {WEIGHED} --model.self_weighting_steps 0"),
]
PLAIN_DESCENT = """
--optim.name sgd --optim.momentum 0 --optim.nesterov false --optim.weight_decay 0 --optim.max_norm 0 --optim.ema_decay 0
--optim.lr_multipliers {} --schedule.name constant --schedule.warmup_steps 0 --run.eval_every 0
"""


def weights_of(folder: Path) -> torch.Tensor:
    """Return the weights of the newest checkpoint as one vector."""
    tensors = checkpoint_tensors(folder / "checkpoints" / "latest")
    names = [name for name in sorted(tensors) if name.startswith("model/") and tensors[name].is_floating_point()]
    return torch.cat([tensors[name].flatten().double() for name in names])


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(ALIKE)))
def test_gradient_of_eight_images_is_the_same_however_they_are_cut(server, data, tmp_path, number):
    """One step of plain descent at rate 1: as 1 x 8, 8 x 1, and on two processes of 4.

    In float64 but for torchvision's parts, which are in float32: there YOLOv3's group norms make 3e-5 of rounding.
    """
    script, alike = ALIKE[number]
    faults = [] if script in (FASTER_RCNN, SCENE_GRAPHS) else [{"float64": True}]
    runs = []
    for processes, batch, accumulation in ((1, 8, 1), (1, 1, 8), (2, 4, 1)):
        place = f"--run.output_dir {tmp_path} --run.name {processes}x{batch} --run.max_steps 1 --optim.lr 1"
        cut = f"--optim.accumulation_steps {accumulation} --data.batch_size_per_device {batch}"
        args = small_settings(script, data, f"{PLAIN_DESCENT} {alike} {place} {cut}")
        folder = server.run(script, args, processes, faults).ok().folder
        runs.append((training_rows(folder)[0], weights_of(folder)))
    (row, weights), *others = runs
    for other_row, other in others:
        assert float((other - weights).norm()) <= 1e-5 * row["train/grad_norm"]
        assert other_row["train/loss"] == pytest.approx(row["train/loss"], rel=1e-5)


@pytest.fixture(scope="module")
def in_one_batch(server, script, settings, tmp_path_factory):
    """(`run(name, cut)`, rows, weights) of four steps of plain descent in float64 in batches of 16 of 18 images."""
    folder = tmp_path_factory.mktemp("cuts")

    def run(name: str, cut: Cut):
        place = f"--run.output_dir {folder} --run.name {name} --run.resume latest --run.save_every 2 --optim.lr 1e-3"
        cuts = f"--optim.accumulation_steps {cut.accumulation} --data.batch_size_per_device {cut.batch}"
        args = settings(f"{PLAIN_DESCENT} {PUBLISHED_DETR} {place} {cuts}")
        faults = [{"float64": True}]
        if cut.killed:
            one = [*args, "--data.batch_size_per_device", str(cut.batch * cut.processes)]
            server.run(script, one, 1, [*faults, kill(3)]).killed()
        return server.run(script, args, cut.processes, faults, env=cut.env).ok()

    whole = run("whole", Cut(1, 16, 1)).folder
    steps = training_rows(whole)
    assert len(steps) == 4
    return run, steps, weights_of(whole)


@pytest.mark.parametrize("name", CUTS)
def test_every_loss_and_weight_is_that_of_one_big_batch(in_one_batch, name):
    run, steps, weights = in_one_batch
    ended = run(name.replace(" ", "_"), CUTS[name])
    for row, other in zip(steps, training_rows(ended.folder), strict=True):
        assert other == pytest.approx(row, rel=1e-6, abs=1e-9)
    travelled = 1e-3 * sum(row["train/grad_norm"] for row in steps)
    assert float((weights_of(ended.folder) - weights).norm()) <= 1e-6 * travelled
    if CUTS[name].killed:
        assert "1 rank(s) x 16 images, this run has 2 x 8" in ended.text
        assert "will not be identical" in ended.text


@pytest.mark.slow
def test_more_images_a_step_see_the_data_that_was_to_be_seen(server, script, resumable, tmp_path):
    """1 process -> 2 of the same batch size: half the steps that were left, and the schedule ends with them."""
    args, _ = resumable(1)
    args += f"--run.output_dir {tmp_path} --run.epochs 4 --optim.lr 1e-3 --schedule.name linear".split()
    args += "--schedule.warmup_steps 0 --schedule.final_factor 0".split()
    folder = server.run(script, args, 1, [kill(7)]).killed().folder  # after the 3 steps of the first epoch
    resumed = server.run(script, args, 2).ok()
    assert "the run ends after step 9 instead of 12" in resumed.text, resumed.text
    after = training_rows(folder)
    assert [row["step"] for row in after] == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert [row["epoch"] for row in after] == [0, 0, 0, 1, 1, 2, 2, 3, 3]
    rates = [row["train/lr/main"] for row in after]
    assert rates == pytest.approx([1e-3 * (1 - at / 12) for at in (0, 1, 2, 3, 4.5, 6, 7.5, 9, 10.5)])
    parts = checkpoint_state(folder / "checkpoints" / "latest")["parts"]
    assert parts["plan"]["total_steps"] == 9
    assert parts["sampler"]["epoch"] in (3, 4)


@pytest.mark.slow
def test_machines_need_no_shared_disk(server, script, resumable, tmp_path):
    """Only the first process sees the run folder."""
    args, reference = resumable(2)
    args += "--run.output_dir runs --run.name apart".split()
    apart = []
    for rank, name in enumerate(("first", "second")):
        (tmp_path / name).mkdir()
        apart.append({"cwd": str(tmp_path / name), "rank": rank})
    server.run(script, args, 2, [*apart, kill(9)]).killed()
    server.run(script, args, 2, apart).ok()
    assert_same_run(tmp_path / "first" / "runs" / "apart", reference)
    assert not list((tmp_path / "second").rglob("*.*"))


@pytest.mark.parametrize(("moved_px", "code"), [(0, 0), (3, 2)])
def test_machines_have_the_same_data_or_end_before_the_first_step(server, script, data, tmp_path, moved_px, code):
    """Each in a folder of its own."""
    apart = []
    for rank in range(2):
        folder = shutil.copytree(data, tmp_path / f"machine{rank}" / "data")
        apart.append({"cwd": str(folder.parent), "rank": rank})
    annotations = folder / "annotations" / "train.json"
    document = json.loads(annotations.read_text())
    document["annotations"][0]["bbox"][0] += moved_px
    annotations.write_text(json.dumps(document))
    args = small_settings(script, Path("data"), f"--run.output_dir {tmp_path} --run.max_steps 1 --run.eval_every 0")
    ended = server.run(script, args, 2, apart, env=ON_TWO_MACHINES)
    assert ended.code == code, ended.text
    assert all(("rank 1 on the machine" in text) == (code == 2) for text in ended.texts)
    assert any(ended.folder.glob("checkpoints/step_*")) == (code == 0)


def test_all_ranks_end_alike_on_bad_data(server, script, settings, tmp_path):
    dirty = ASSETS / "dirty"
    data = f"--data.train {dirty}/annotations/instances.json --data.image_dir {dirty}/images"
    assert server.run(script, settings(f"--run.output_dir {tmp_path} {data}"), processes=2).code == 2


@pytest.mark.parametrize("mode", ["predcls", "sgdet"])
def test_a_rank_without_relations_does_not_stop_the_others(server, data, tmp_path, mode):
    """Of two ranks one has an image with relations in each step; the other none, or not even an object."""
    document = json.loads((data / "annotations" / "train.json").read_text())
    with_objects = {image["id"] for image in document["images"][:6]}
    first = document["images"][0]["id"]
    document["annotations"] = [box for box in document["annotations"] if box["image_id"] in with_objects]
    document["rel_annotations"] = [each for each in document["rel_annotations"] if each["image_id"] == first]
    (tmp_path / "train.json").write_text(json.dumps(document))
    few = f"--data.train {tmp_path}/train.json --data.image_dir {data}/train --data.batch_size_per_device 1"
    short = f"--run.output_dir {tmp_path} --run.epochs 1 --run.eval_every 0"
    args = small_settings(SCENE_GRAPHS, data, f"{short} {few} --model.mode {mode} --eval.metric_for_best R@20")
    ended = server.run(SCENE_GRAPHS, args, 2).ok()
    losses = [row["train/loss_rel"] for row in training_rows(ended.folder)]
    assert len(losses) == 9
    assert max(losses) > 0
