"""The numbers of CVNets (apple/ml-cvnets); every case, size and parameter comes from the files."""

import json
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
from golden_files import Tensors, ending, group, read_tensors
from golden_files import arrays as golden_arrays
from numpy.testing import assert_allclose
from pytest import approx
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

from toolkit.data.batches import windows
from toolkit.data.sampling import accumulation_at
from toolkit.detectors.ssd.criterion import (
    IGNORED_LABEL,
    PaddedObjects,
    SelfWeighting,
    SsdCriterion,
    anchor_scales,
    decode_offsets,
    encode_boxes,
    level_anchors,
    match_anchors,
    mine_negatives,
    multibox_loss,
)
from toolkit.step.ema import Ema
from toolkit.step.freezing import bn_momentum, set_bn_momentum
from toolkit.step.losses import window_denominators
from toolkit.step.schedules import lr_factor

ASPECT_RATIOS = [2, 3]  # the README fixes them for anchors/*: both, or on a level with 4 anchors the first
NAMES = {
    "cosine": "cosine",
    "polynomial": "poly",
    "multi_step": "multistep",
    "fixed": "constant",
    "cyclic": "cyclic",
}

arrays = partial(golden_arrays, program="cvnets")
tensors = partial(read_tensors, program="cvnets")


@cache
def documents(folder: Path, topic: str) -> dict:
    path = folder / f"cvnets_{topic}.json"
    entries = json.loads(path.read_text())
    return {name: entry for name, entry in entries.items() if isinstance(entry, dict)}


def options_of(case: dict) -> dict:
    """By the last part of their names."""
    return {key.rpartition(".")[2]: value for key, value in case["options"].items()}


TOPICS = {
    "schedule": "schedulers",
    "momentum_case": "adjust_norm_momentum",
    "accumulation": "accumulation",
}


def pytest_generate_tests(metafunc):
    folder = metafunc.config.getoption("golden")
    if "ssd_case" in metafunc.fixturenames:
        names = ending(folder, "ssd", "/scores", "cvnets")
        cases = [tensors(folder, "ssd", f"{name}/") for name in names]
        metafunc.parametrize("ssd_case", cases, ids=names)
    for fixture, topic in TOPICS.items():
        if fixture in metafunc.fixturenames:
            cases = documents(folder, topic)
            metafunc.parametrize(fixture, list(cases.values()), ids=list(cases))


class Cvnets:
    """The options of a schedule, and what they are called here."""

    def __init__(self, case: dict):
        options = group(case["options"], "scheduler")
        own = group(options, options["name"])
        self.options = options
        self.own = own
        self.name = NAMES[options["name"]]
        self.by_step = options.get("is_iteration_based", True)
        self.epoch_steps = case["iters_per_epoch"]
        self.epochs = options.get("max_epochs")
        self.warmup = options.get("warmup_iterations")
        self.stairs = own.get("epochs_per_cycle", 1)
        if self.name == "cyclic":
            self.low = own["min_lr"]
            self.end = own["last_cycle_end_lr"]
        else:
            self.low = own.get("max_lr", own.get("start_lr", own.get("lr")))  # that the warm-up leads to
            self.end = own.get("min_lr", own.get("end_lr", 0.0))
        self.lr = self.low * self.stairs  # of the optimizer here; CVNets names the shortest stair of cyclic

    def ours(self, step: float, **changed) -> float:
        own = self.own
        milestones = own.get("milestones", own.get("steps"))
        options = {
            "warmup_steps": self.warmup,
            "warmup_factor": self.options["warmup_init_lr"] / self.low,
            "final_factor": self.end / self.lr,
            "power": own.get("power", 1.0),
            "gamma": own.get("gamma", 1.0),
            "milestones": [epoch * self.epoch_steps for epoch in milestones or ()],
            "step_size": self.epoch_steps,
            "stairs": self.stairs,
            "cycles": own.get("total_cycles", 1) - 1,
            "last_cycle": own.get("last_cycle_type", "linear"),
        }
        factor = lr_factor(step, self.name, **options | changed)
        return self.lr * factor

    def expected(self, step: int, epoch: int) -> float:
        """Ours at a step, where CVNets goes by steps; where it goes by epochs, ours at another moment, see below."""
        if step < self.warmup or self.by_step or self.name in ("constant", "multistep"):
            # max_iterations + 1 steps are taken there, here as many as asked for
            return self.ours(step, total_steps=self.options["max_iterations"] + 1)
        if self.name == "cyclic":
            return self.expected_cyclic(step, epoch)
        total = self.epochs * self.epoch_steps
        if not self.options.get("adjust_period_for_epochs"):  # our curve at the start of the epoch, without warm-up
            start = epoch * self.epoch_steps
            return self.ours(start, total_steps=total, warmup_steps=0)
        # our curve at the start of the epoch before, with a warm-up of whole epochs. The first epoch after the warm-up
        # lies before the top of the cosine, which goes down on both sides
        warm_epochs = (self.warmup - 1) // self.epoch_steps
        moment = abs(epoch - 1 - warm_epochs) + warm_epochs
        return self.ours(
            moment * self.epoch_steps,
            total_steps=total,
            warmup_steps=warm_epochs * self.epoch_steps,
        )

    def expected_cyclic(self, step: int, epoch: int) -> float:
        own = self.own
        cyclic_epochs = (own["total_cycles"] - 1) * self.stairs
        epochs = self.epochs
        if epoch == cyclic_epochs:
            step = epoch * self.epoch_steps  # the last decay starts a moment later, with the next epoch
        elif epoch > cyclic_epochs and own["last_cycle_type"] == "linear":
            step = (epoch + 1) * self.epoch_steps  # ours at the end of the epoch
        elif epoch > cyclic_epochs:
            step = epoch * self.epoch_steps
            epochs += 1  # ours, if there were one more epoch
        return self.ours(step, total_steps=epochs * self.epoch_steps)


def test_schedules_are_those_of_the_original_at_the_same_moment(schedule):
    case = Cvnets(schedule)
    expected = []
    for step, epoch in zip(schedule["curr_iter"], schedule["epoch"], strict=True):
        expected.append(case.expected(step, epoch))
    assert_allclose(expected, schedule["unrounded_get_lr"], rtol=1e-6)
    rounded = np.array(schedule["lr"]).reshape(len(expected), -1)  # one column per group
    factors = schedule["options"].get("optim.lr_multipliers", [1.0])
    assert_allclose(np.outer(expected, factors), rounded, rtol=1e-6, atol=1e-8)


class Module(nn.Module):
    """A state dict as a module: float entries as parameters, the others as buffers."""

    def __init__(self, state: Tensors):
        super().__init__()
        for name, value in state.items():
            value = value.clone()
            if value.is_floating_point() and "running" not in name:
                setattr(self, name, nn.Parameter(value))
            else:
                self.register_buffer(name, value)


def at_step(values: Tensors, step: int) -> Tensors:
    return {name.replace(".", "_"): steps[step] for name, steps in values.items()}


def test_ema(golden):
    ours = tensors(golden, "ema", "model/")
    theirs = tensors(golden, "ema", "ema/")
    options = arrays(golden, "ema")
    model = Module(at_step(ours, 0))
    ema = Ema(model, 1 - float(options["momentum"]), warmup=False)
    assert ema.module.training == bool(options["ema_training_mode"])
    (num_steps,) = set(map(len, ours.values()))
    for step in range(num_steps):
        state = at_step(ours, step)
        expected = at_step(theirs, step)
        if step:
            model.load_state_dict(state)
            ema.update(model)
        for name, value in ema.module.state_dict().items():
            if value.is_floating_point():
                assert_close(value, expected[name], rtol=0, atol=1e-6)
            else:  # truncated at every update there, so that they stay behind; copied here
                assert value.equal(state[name])


def test_norm_momentum(momentum_case):
    options = options_of(momentum_case)
    by_step = options["is_iteration_based"]
    epoch_steps = momentum_case["iters_per_epoch"]
    warm_there = options["warmup_iterations"]
    if by_step:
        total = options["max_iterations"]
        warmup = warm_there
    else:
        total = options["max_epochs"] * epoch_steps
        warmup = 0
    kinds = [name.split() for name in momentum_case["modules"]]
    modules = nn.ModuleList()
    for kind, mode in kinds:
        module = getattr(nn, kind)(2)
        modules.append(module.train(mode == "(train)"))
    compared = 0
    start = options["momentum"]
    for step, theirs in enumerate(momentum_case["momentum_per_iteration"]):
        if step > total or (not by_step and step == total):
            break  # beyond the end of training
        moment = step
        if not by_step:
            epoch_start = step // epoch_steps * epoch_steps
            moment = epoch_start if step >= warm_there else 0
        momentum = bn_momentum(
            moment,
            total,
            start,
            options["final_momentum_value"],
            warmup,
            options["anneal_type"],
        )
        set_bn_momentum(modules, momentum)
        for (kind, mode), module, value in zip(kinds, modules, theirs, strict=True):
            if kind in ("BatchNorm2d", "SyncBatchNorm") or mode != "(train)":
                assert module.momentum == approx(value, abs=1e-6)
                compared += 1
            else:  # left alone there, no reason why
                assert module.momentum == approx(momentum)
                assert value == start
    assert compared


def test_anchors(golden):
    data = tensors(golden, "ssd", "anchors/")
    strides = data["output_strides"].tolist()
    counts = data["count_per_level"].tolist()
    sides = data["image_hw"].tolist()
    scales = anchor_scales(len(strides), *data["scale_min_max"].tolist())
    assert_allclose(scales, data["sizes_min_max_per_level"], rtol=1e-5)
    levels = []
    for stride, count, of_level in zip(strides, counts, scales, strict=True):
        if stride == -1:  # one cell
            stride = max(sides)
        height, width = (-(-side // stride) for side in sides)
        per_cell = count // (height * width)
        ratios = ASPECT_RATIOS[: (per_cell - 2) // 2]
        anchors = level_anchors((height, width), of_level, ratios)
        assert len(anchors) == count
        levels.append(anchors)
    assert_close(torch.cat(levels), data["boxes_cxcywh"], rtol=1e-5, atol=0)


def matched(case: Tensors) -> tuple[PaddedObjects, Tensor, Tensor]:
    """The case's boxes, padded, and our labels and indices for its anchors. Label 0 is the background there."""
    labels = torch.where(case["gt_labels"] > 0, case["gt_labels"] - 1, -1)
    boxes = case["gt_boxes_xyxy"].nan_to_num()
    crowd = torch.zeros_like(labels, dtype=torch.bool)
    objects = PaddedObjects(boxes, labels, crowd)
    threshold = float(case["iou_threshold"])
    matches = match_anchors(case["anchors_cxcywh"], objects, threshold)
    return objects, *matches


def test_matching_and_offsets(ssd_case):
    objects, labels, index = matched(ssd_case)
    assert labels.equal(ssd_case["matched_labels"])
    anchors = ssd_case["anchors_cxcywh"]
    center_variance = float(ssd_case["center_variance"])
    size_variance = float(ssd_case["size_variance"])
    columns = index[..., None].expand(-1, -1, 4)
    boxes = objects.boxes.gather(1, columns)
    offsets = encode_boxes(boxes, anchors, center_variance, size_variance)
    has_boxes = ssd_case["num_gt"] > 0
    expected = ssd_case["encoded_offsets"]
    assert_close(offsets[has_boxes], expected[has_boxes], rtol=1e-5, atol=1e-5)
    decoded = decode_offsets(
        ssd_case["box_regression"],
        anchors,
        center_variance,
        size_variance,
    )
    assert_close(decoded, ssd_case["decoded_boxes_xyxy"], rtol=1e-5, atol=1e-6)


def test_loss_mining_and_gradients(ssd_case):
    """Of the whole criterion, from boxes in pixels."""
    scores = ssd_case["scores"].requires_grad_()
    regression = ssd_case["box_regression"].requires_grad_()
    objects, labels, _ = matched(ssd_case)
    ratio = int(ssd_case["neg_pos_ratio"])
    losses_as_background = -scores.detach().log_softmax(-1)[..., 0]
    negatives = mine_negatives(losses_as_background, labels, ratio)
    used = negatives | (labels > 0)
    assert used.equal(ssd_case["mining_mask"])

    hw = torch.tensor([64, 128])  # powers of two, so that pixels are exact
    pixels = objects.boxes * hw.flip(0).repeat(2)
    targets = []
    for i, n in enumerate(ssd_case["num_gt"].tolist()):
        target = {
            "boxes": pixels[i, :n],
            "labels": objects.labels[i, :n],
            "iscrowd": torch.zeros(n),
        }
        targets.append(target)
    criterion = SsdCriterion(
        float(ssd_case["iou_threshold"]),
        float(ssd_case["center_variance"]),
        float(ssd_case["size_variance"]),
        ratio,
        float(ssd_case["label_smoothing"]),
    )
    criterion.train(bool(ssd_case["training"]))
    anchors = ssd_case["anchors_cxcywh"]
    counts = criterion.denominators(anchors, targets, hw)
    (denominators,) = window_denominators([counts], "cpu", "original")
    losses, metrics = criterion(scores, regression, anchors, hw, targets, denominators)
    positives = (ssd_case["matched_labels"] > 0).sum()
    assert counts["positives"] == positives
    assert metrics["positives"][0] == positives
    assert_close(losses["loss_loc"], ssd_case["loss/reg_loss"], rtol=1e-5, atol=0)
    assert_close(losses["loss_cls"], ssd_case["loss/cls_loss"], rtol=1e-5, atol=0)
    total = sum(losses.values())
    assert_close(total, ssd_case["loss/total_loss"], rtol=1e-5, atol=0)
    of_scores, of_regression = torch.autograd.grad(total, (scores, regression))
    assert_close(of_scores, ssd_case["grad_scores"], rtol=1e-5, atol=1e-7)
    assert_close(of_regression, ssd_case["grad_box_regression"], rtol=1e-5, atol=1e-7)


def test_self_weighting(golden):
    data = tensors(golden, "ssd_self_weighting")
    balance = SelfWeighting(int(data["max_monitor_iter"]), int(data["update_wt_freq"]))
    before = 1.0
    weights = data["wt_loc_after"].tolist()
    assert len(data["labels"]) == len(weights)
    for call, after in enumerate(weights):
        labels = data["labels"][call]
        cls_sum, loc_sum = multibox_loss(
            data["scores"][call],
            data["boxes"][call],
            labels,
            data["targets"][call],
            ratio=3,
        )
        # Here a step is weighted by what the steps before it gave, there by its own losses too.
        assert float(balance.weight) == approx(before, rel=1e-5)
        balance.observe(torch.tensor([cls_sum, loc_sum]))
        assert float(balance.weight) == approx(after, rel=1e-5)
        positives = max(1, int((labels > 0).sum()))
        regression = loc_sum * after / positives
        classification = cls_sum / positives
        losses = [regression + classification, regression, classification]
        assert_allclose(losses, data["total_reg_cls"][call], rtol=1e-5)
        before = after
    assert not bool((labels == IGNORED_LABEL).any())
    assert len(set(weights)) > 1


class Linear:
    """The run of the traces with our parts; `theirs`: gradients summed, and the trailing micro-batches left out."""

    def __init__(self, case: dict, theirs: bool):
        self.options = options_of(case)
        self.theirs = theirs
        self.step = 0
        weight = case["init_weight"]
        self.model = nn.Linear(len(weight), 1).double()  # where a weight crosses 0, float32 leaves 1e-5
        with torch.no_grad():
            self.model.weight.copy_(torch.tensor([weight]))
            self.model.bias.fill_(case["init_bias"])
        self.batches = []
        for batch in case["batches"]:
            samples = torch.tensor(batch["samples"])
            targets = torch.tensor(batch["targets"])
            self.batches.append((samples.double(), targets.double()))
        self.ema = Ema(self.model, 1 - case["ema_momentum"], warmup=False)
        self.seen = []

    def lr(self) -> float:
        options = self.options
        peak = options["max_lr"]
        factor = lr_factor(
            self.step,
            "cosine",
            total_steps=options["max_iterations"] + 1,
            warmup_steps=options["warmup_iterations"],
            warmup_factor=options["warmup_init_lr"] / peak,
            final_factor=options["min_lr"] / peak,
        )
        lr = peak * factor
        return round(lr, 8) if self.theirs else lr

    def window_size(self, epoch: int) -> int:
        return accumulation_at(epoch, self.options["accum_freq"], self.options["accum_after_epoch"])

    def epoch(self, epoch: int) -> None:
        size = self.window_size(epoch)
        for window in windows(self.batches, size):
            counts = [{"samples": len(targets)} for _, targets in window]
            denominators = window_denominators(counts, "cpu")
            lr = self.lr()
            optimizer = torch.optim.SGD(self.model.parameters(), lr=lr)
            for (samples, targets), denominator in zip(window, denominators, strict=True):
                loss = F.mse_loss(self.model(samples), targets)
                weight = self.model.weight.detach().clone()
                self.seen.append((self.step, lr, weight, float(loss.detach())))
                if not self.theirs:
                    loss = loss * len(targets) / denominator["samples"]
                loss.backward()
            if self.theirs and len(window) < size:
                break
            optimizer.step()
            optimizer.zero_grad()
            self.step += 1
            self.ema.update(self.model)
        self.model.zero_grad()


def test_accumulation(accumulation):
    """The original's trace is ours with summed gradients and without each epoch's last partial window."""
    theirs = Linear(accumulation, theirs=True)
    ours = Linear(accumulation, theirs=False)
    num_batches = len(ours.batches)
    accumulates = False
    for epoch, end in enumerate(accumulation["epoch_ends"]):
        size = theirs.window_size(epoch)
        accumulates |= size > 1
        before = ours.step
        theirs.epoch(epoch)
        ours.epoch(epoch)
        assert ours.step - before == -(-num_batches // size)  # every micro-batch counts
        assert theirs.step == end["train_iterations"]
        assert_allclose(theirs.model.weight.detach()[0], end["weight"], rtol=1e-5)
        assert_allclose(theirs.ema.module.weight[0], end["ema_weight"], rtol=1e-5)
        left_over = end["leftover_grad_weight"]
        has_left_over = left_over is not None and np.any(left_over)
        assert bool(has_left_over) == bool(num_batches % size)
        if not accumulates:
            assert_allclose(ours.model.weight.detach()[0], end["weight"], rtol=1e-5)
    traces = accumulation["micro_batches"]
    for (step, lr, weight, loss), trace in zip(theirs.seen, traces, strict=True):
        assert step == trace["train_iterations_seen"]
        assert lr == approx(trace["lr"], rel=1e-9)
        assert_allclose(weight[0], trace["weight"], rtol=1e-5)
        assert loss == approx(trace["loss"], rel=1e-5)
    if accumulates:
        assert not torch.allclose(ours.model.weight, theirs.model.weight, rtol=1e-3)
