"""The same training whatever number of micro-batches, processes and machines, with constant norms and no dropout."""

import math

import pytest
import torch
from launching import checkpoint_tensors, flat, kill, training_rows
from places import SMALL_CONFIGS

PUBLISHED = SMALL_CONFIGS / "detr_published.yaml"


# With these nothing that the images of a batch have in common is left.
WEIGHED = {"--loss.class_weights": "{circle: 3.0, star: 0.2}"}
ALIKE = {
    "train_detr": [{"--config": PUBLISHED} | WEIGHED],
    "train_yolov3": [{"--model.norm": "group", "--data.multi_scale": "[]"} | WEIGHED],
    "train_faster_rcnn": [
        {"--model.freeze": "norms"} | WEIGHED,
        {"--model.freeze": "norms", "--model.masks": True, "--model.mask_convs": 1, "--model.mask_channels": 8},
    ],
    "train_sgg": [
        {"--model.freeze": "norms", "--model.head_options.dropout": 0},
        {"--model.freeze": "detector_and_norms", "--model.mode": "sgcls", "--model.head": "vctree",
         "--model.head_options.dropout": 0},
        {"--config": SMALL_CONFIGS / "egtr.yaml", "--model.freeze": "norms",
         "--model.detector_options.num_denoising": 0},
    ],
    "train_ssd": [{"--model.norm": "group", "--data.multi_scale": "[]", "--model.self_weighting_steps": 0} | WEIGHED],
}  # fmt: skip
ONE_STEP = {
    "--optim.name": "sgd", "--optim.momentum": 0, "--optim.lr": 1, "--optim.weight_decay": 0, "--optim.max_norm": 0,
    "--optim.nesterov": False, "--optim.ema_decay": 0, "--optim.lr_multipliers": "{}", "--schedule.name": "constant",
    "--schedule.warmup_steps": 0, "--run.eval_every": 0, "--run.max_steps": 1,
}  # fmt: skip


@pytest.mark.every_script("slow")
def test_the_gradient_of_a_window_is_the_same_however_it_is_cut(server, script, settings, tmp_path):
    """Eight images as 1 x 8, 8 x 1 and two processes of 4: one step of plain descent at rate 1.

    In float64 but for torchvision's parts, which are in float32: there YOLOv3's group norms make 3e-5 of rounding.
    """
    precise = [] if script.name in ("train_faster_rcnn", "train_sgg") else [{"float64": True}]
    cuts = {"1x8": (1, 8, 1), "8x1": (1, 1, 8), "ranks": (2, 4, 1)}
    for number, alike in enumerate(ALIKE[script.name]):
        runs = {}
        for name, (processes, batch, accumulation) in cuts.items():
            given = ONE_STEP | alike | {
                "--run.output_dir": tmp_path, "--run.name": f"{name}_{number}", "--data.batch_size_per_device": batch,
                "--optim.accumulation_steps": accumulation,
            }  # fmt: skip
            folder = server.run(script, settings(*flat(given)), processes, precise).ok().folder
            row, weights = training_rows(folder)[0], checkpoint_tensors(folder / "checkpoints" / "latest")
            floats = {k: v for k, v in weights.items() if k.startswith("model/") and v.is_floating_point()}
            runs[name] = row, torch.cat([floats[key].flatten().double() for key in sorted(floats)])
        row, big = runs.pop("1x8")
        for name, (other_row, other) in runs.items():
            apart = float((other - big).norm()) / row["train/grad_norm"]
            assert apart <= 1e-5, (alike, name, apart)
            assert other_row["train/loss"] == pytest.approx(row["train/loss"], rel=1e-5), (alike, name)


@pytest.fixture(scope="module")
def detr(settings, tmp_path_factory):
    """`detr(*args)`: small settings of the published DETR."""
    folder = tmp_path_factory.mktemp("equality")
    fixed = ("--config", PUBLISHED, "--run.output_dir", folder, "--run.eval_every", 0, "--optim.ema_decay", 0.0)
    return lambda *args: settings(*fixed, *args)


def test_one_big_batch_equals_micro_batches_equals_ranks(server, script, detr):
    """1 x 16 = 4 x 4 = 2 ranks x 8 in float64, in every loss and gradient; the last window has two of 18 images."""
    plain = ("--optim.name", "sgd", "--optim.momentum", 0, "--optim.lr", 1e-3, "--optim.weight_decay", 0,
             "--optim.max_norm", 0)  # fmt: skip
    cuts = {"big": (1, 16, 1), "micro": (1, 4, 4), "ranks": (2, 8, 1)}
    runs = {}
    for name, (processes, batch, accumulation) in cuts.items():
        args = detr(*plain, "--run.name", name, "--data.batch_size_per_device", batch,
                    "--optim.accumulation_steps", accumulation)  # fmt: skip
        folder = server.run(script, args, processes, [{"float64": True}]).ok().folder
        runs[name] = training_rows(folder), checkpoint_tensors(folder / "checkpoints" / "latest")
    steps, weights = runs.pop("big")
    assert len(steps) == 4
    travelled = 1e-3 * sum(row["train/grad_norm"] for row in steps)
    for name, (other_steps, other_weights) in runs.items():
        for row, other in zip(steps, other_steps, strict=True):
            assert other == pytest.approx(row, rel=1e-6, abs=1e-9), name
        floats = [k for k, v in weights.items() if k.startswith("model/") and v.is_floating_point()]
        assert weights[floats[0]].dtype == torch.float64
        apart = math.sqrt(sum(float((weights[k] - other_weights[k]).square().sum()) for k in floats))
        assert apart <= 1e-6 * travelled, name


def test_processes_and_machines_make_the_same_losses(server, script, detr):
    """One process; two machines of one process each; killed and resumed with two processes."""
    one = detr("--run.name", "one", "--optim.accumulation_steps", 2, "--run.save_every", 2)
    reference = training_rows(server.run(script, one).ok().folder)
    assert len(reference) == 6
    killed = [*one, "--run.name", "killed"]
    server.run(script, killed, 1, [kill(6)])
    resumed = [*killed, "--run.resume", "latest", "--data.batch_size_per_device", "2"]
    others = {"resumed": training_rows(server.run(script, resumed, 2).ok().folder)}

    machines = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}  # as torchrun --nnodes 2 --nproc_per_node 1 says it
    args = [*one, "--run.name", "machines", "--data.batch_size_per_device", "2"]
    others["machines"] = training_rows(server.run(script, args, 2, env=machines).ok().folder)
    for name, steps in others.items():
        for row, other in zip(reference, steps, strict=True):
            assert other == pytest.approx(row, rel=2e-4, abs=1e-5), name
