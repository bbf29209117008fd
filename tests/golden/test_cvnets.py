"""The numbers of CVNets (apple/ml-cvnets); every case, size and parameter comes from the files."""

import json
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
import torch
from golden_files import arrays as golden_arrays
from golden_files import tensors_below
from torch import nn
from torch.nn import functional as F

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
NAMES = {"cosine": "cosine", "polynomial": "poly", "multi_step": "multistep", "fixed": "constant", "cyclic": "cyclic"}


@cache
def documents(folder: Path, topic: str) -> dict:
    return {k: v for k, v in json.loads((folder / f"cvnets_{topic}.json").read_text()).items() if isinstance(v, dict)}


arrays = partial(golden_arrays, program="cvnets")


def tensors(folder: Path, topic: str, prefix: str = "") -> dict[str, torch.Tensor]:
    return tensors_below(arrays(folder, topic), prefix)


def pytest_generate_tests(metafunc):
    folder = metafunc.config.getoption("golden")
    if "ssd_case" in metafunc.fixturenames:
        names = [key.removesuffix("/scores") for key in arrays(folder, "ssd") if key.endswith("/scores")]
        metafunc.parametrize("ssd_case", [tensors(folder, "ssd", f"{name}/") for name in names], ids=names)
    for fixture, topic in (
        ("schedule", "schedulers"), ("momentum_case", "adjust_norm_momentum"), ("accumulation", "accumulation")
    ):  # fmt: skip
        if fixture in metafunc.fixturenames:
            cases = documents(folder, topic)
            metafunc.parametrize(fixture, list(cases.values()), ids=list(cases))


class Cvnets:
    """The options of a schedule, and what they are called here."""

    def __init__(self, case: dict):
        self.options = {key.removeprefix("scheduler."): value for key, value in case["options"].items()}
        get, self.name = self.options.get, NAMES[self.options["name"]]
        self.by_step, self.epoch_steps = get("is_iteration_based", True), case["iters_per_epoch"]
        self.epochs, self.warmup = get("max_epochs"), get("warmup_iterations")
        prefix = f"{self.options['name']}."
        own = {key.removeprefix(prefix): v for key, v in self.options.items() if key.startswith(prefix)}
        self.own, self.stairs = own, own.get("epochs_per_cycle", 1)
        self.low = own.get("max_lr", own.get("start_lr", own.get("lr")))  # that the warm-up leads to
        self.end = own.get("min_lr", own.get("end_lr", 0.0))
        if self.name == "cyclic":
            self.low, self.end = own["min_lr"], own["last_cycle_end_lr"]
        self.lr = self.low * self.stairs  # of the optimizer here; CVNets names the shortest stair of cyclic

    def ours(self, step: float, **options) -> float:
        options = {
            "warmup_steps": self.warmup, "warmup_factor": self.options["warmup_init_lr"] / self.low,
            "final_factor": self.end / self.lr, "power": self.own.get("power", 1.0),
            "gamma": self.own.get("gamma", 1.0),
            "milestones": [e * self.epoch_steps for e in self.own.get("milestones", self.own.get("steps")) or ()],
            "step_size": self.epoch_steps, "stairs": self.stairs, "cycles": self.own.get("total_cycles", 1) - 1,
            "last_cycle": self.own.get("last_cycle_type", "linear"), **options,
        }  # fmt: skip
        return self.lr * lr_factor(step, self.name, **options)

    def expected(self, step: int, epoch: int) -> float:
        """Ours at a step, where CVNets goes by steps; where it goes by epochs, ours at another moment, see below."""
        if step < self.warmup or self.by_step or self.name in ("constant", "multistep"):
            # max_iterations + 1 steps are taken there, here as many as asked for
            return self.ours(step, total_steps=self.options["max_iterations"] + 1)
        total = self.epochs * self.epoch_steps
        if self.name == "cyclic":
            return self.expected_cyclic(step, epoch)
        if not self.options.get("adjust_period_for_epochs"):  # our curve at the start of the epoch, without warm-up
            return self.ours(epoch * self.epoch_steps, total_steps=total, warmup_steps=0)
        # our curve at the start of the epoch before, with a warm-up of whole epochs. The first epoch after the warm-up
        # lies before the top of the cosine, which goes down on both sides
        warm_epochs = (self.warmup - 1) // self.epoch_steps
        moment = abs(epoch - 1 - warm_epochs) + warm_epochs
        return self.ours(moment * self.epoch_steps, total_steps=total, warmup_steps=warm_epochs * self.epoch_steps)

    def expected_cyclic(self, step: int, epoch: int) -> float:
        cyclic_epochs, epochs = (self.own["total_cycles"] - 1) * self.stairs, self.epochs
        if epoch == cyclic_epochs:
            step = epoch * self.epoch_steps  # the last decay starts a moment later, with the next epoch
        elif epoch > cyclic_epochs and self.own["last_cycle_type"] == "linear":
            step = (epoch + 1) * self.epoch_steps  # ours at the end of the epoch
        elif epoch > cyclic_epochs:
            step, epochs = epoch * self.epoch_steps, epochs + 1  # ours, if there were one more epoch
        return self.ours(step, total_steps=epochs * self.epoch_steps)


def test_schedules_are_those_of_the_original_at_the_same_moment(schedule):
    case = Cvnets(schedule)
    steps = zip(schedule["curr_iter"], schedule["epoch"], strict=True)
    expected = [case.expected(step, epoch) for step, epoch in steps]
    np.testing.assert_allclose(expected, schedule["unrounded_get_lr"], rtol=1e-6)
    rounded = np.array(schedule["lr"]).reshape(len(expected), -1)  # one column per group
    factors = np.array(schedule["options"].get("optim.lr_multipliers", [1.0]))
    np.testing.assert_allclose(np.outer(expected, factors), rounded, rtol=1e-6, atol=1e-8)


class Module(nn.Module):
    """A state dict as a module: float entries as parameters, the others as buffers."""

    def __init__(self, state: dict[str, torch.Tensor]):
        super().__init__()
        for name, value in state.items():
            key = name.replace(".", "_")
            if value.is_floating_point() and "running" not in name:
                setattr(self, key, nn.Parameter(value.clone()))
            else:
                self.register_buffer(key, value.clone())


def test_ema(golden):
    ours, theirs = tensors(golden, "ema", "model/"), tensors(golden, "ema", "ema/")
    model = Module({name: values[0] for name, values in ours.items()})
    ema = Ema(model, 1 - float(arrays(golden, "ema")["momentum"]), warmup=False)
    assert ema.module.training == bool(arrays(golden, "ema")["ema_training_mode"])
    for step in range(len(next(iter(ours.values())))):
        if step:
            model.load_state_dict({name.replace(".", "_"): values[step] for name, values in ours.items()})
            ema.update(model)
        for name, value in ema.module.state_dict().items():
            original = next(key for key in ours if key.replace(".", "_") == name)
            if value.is_floating_point():
                torch.testing.assert_close(value, theirs[original][step], rtol=0, atol=1e-6)
            else:  # truncated at every update there, so that they stay behind; copied here
                assert value.equal(ours[original][step])


def test_norm_momentum(momentum_case):
    options = {key.rpartition(".")[2]: value for key, value in momentum_case["options"].items()}
    by_step, epoch_steps = options["is_iteration_based"], momentum_case["iters_per_epoch"]
    epochs_or_steps = options["max_iterations"] if by_step else options["max_epochs"]
    total, warmup = (epochs_or_steps, options["warmup_iterations"]) if by_step else (epochs_or_steps * epoch_steps, 0)
    kinds = [name.split() for name in momentum_case["modules"]]
    modules = nn.ModuleList(getattr(nn, kind)(2).train(mode == "(train)") for kind, mode in kinds)
    compared = 0
    for step, theirs in enumerate(momentum_case["momentum_per_iteration"]):
        if step > total or not by_step and step // epoch_steps >= options["max_epochs"]:
            break  # beyond the end of training
        moment = step if by_step else step // epoch_steps * epoch_steps if step >= options["warmup_iterations"] else 0
        start = options["momentum"]
        momentum = bn_momentum(moment, total, start, options["final_momentum_value"], warmup, options["anneal_type"])
        set_bn_momentum(modules, momentum)
        for (kind, mode), module, value in zip(kinds, modules, theirs, strict=True):
            if kind in ("BatchNorm2d", "SyncBatchNorm") or mode != "(train)":
                assert module.momentum == pytest.approx(value, abs=1e-6)
                compared += 1
            else:  # left alone there, no reason why
                assert module.momentum == pytest.approx(momentum) and value == start
    assert compared


def test_anchors(golden):
    data = tensors(golden, "ssd", "anchors/")
    strides, counts = data["output_strides"].tolist(), data["count_per_level"].tolist()
    scales = anchor_scales(len(strides), *data["scale_min_max"].tolist())
    np.testing.assert_allclose(scales, data["sizes_min_max_per_level"], rtol=1e-5)
    levels = []
    for stride, count, of_level in zip(strides, counts, scales, strict=True):
        hw = (1, 1) if stride == -1 else tuple(-(-side // stride) for side in data["image_hw"].tolist())
        ratios = ASPECT_RATIOS[: (count // (hw[0] * hw[1]) - 2) // 2]
        levels.append(level_anchors(hw, of_level, ratios))
    assert [len(level) for level in levels] == counts
    torch.testing.assert_close(torch.cat(levels), data["boxes_cxcywh"], rtol=1e-5, atol=0)


def matched(case) -> tuple[PaddedObjects, torch.Tensor, torch.Tensor]:
    """The case's boxes, padded, and our labels and indices for its anchors. Label 0 is the background there."""
    labels = torch.where(case["gt_labels"] > 0, case["gt_labels"] - 1, -1)
    objects = PaddedObjects(case["gt_boxes_xyxy"].nan_to_num(), labels, torch.zeros_like(labels, dtype=torch.bool))
    return objects, *match_anchors(case["anchors_cxcywh"], objects, float(case["iou_threshold"]))


def test_matching_and_offsets(ssd_case):
    objects, labels, index = matched(ssd_case)
    assert labels.equal(ssd_case["matched_labels"])
    variances = float(ssd_case["center_variance"]), float(ssd_case["size_variance"])
    boxes = objects.boxes.gather(1, index[..., None].expand(-1, -1, 4))
    offsets = encode_boxes(boxes, ssd_case["anchors_cxcywh"], *variances)
    has_boxes = ssd_case["num_gt"] > 0
    torch.testing.assert_close(offsets[has_boxes], ssd_case["encoded_offsets"][has_boxes], rtol=1e-5, atol=1e-5)
    decoded = decode_offsets(ssd_case["box_regression"], ssd_case["anchors_cxcywh"], *variances)
    torch.testing.assert_close(decoded, ssd_case["decoded_boxes_xyxy"], rtol=1e-5, atol=1e-6)


def test_loss_mining_and_gradients(ssd_case):
    """Of the whole criterion, from boxes in pixels."""
    scores, regression = (ssd_case[name].requires_grad_() for name in ("scores", "box_regression"))
    objects, labels, _ = matched(ssd_case)
    ratio = int(ssd_case["neg_pos_ratio"])
    used = mine_negatives(-scores.detach().log_softmax(-1)[..., 0], labels, ratio) | (labels > 0)
    assert used.equal(ssd_case["mining_mask"])

    hw = torch.tensor([64, 128])  # powers of two, so that pixels are exact
    rows = zip(objects.boxes * hw.flip(0).repeat(2), objects.labels, ssd_case["num_gt"].tolist(), strict=True)
    targets = [{"boxes": boxes[:n], "labels": own[:n], "iscrowd": torch.zeros(n)} for boxes, own, n in rows]
    thresholds = (float(ssd_case[name]) for name in ("iou_threshold", "center_variance", "size_variance"))
    criterion = SsdCriterion(*thresholds, ratio, float(ssd_case["label_smoothing"])).train(bool(ssd_case["training"]))
    anchors = ssd_case["anchors_cxcywh"]
    counts = criterion.denominators(anchors, targets, hw)
    (denominators,) = window_denominators([counts], "cpu", "original")
    losses, metrics = criterion(scores, regression, anchors, hw, targets, denominators)
    assert counts["positives"] == (ssd_case["matched_labels"] > 0).sum() == metrics["positives"][0]
    torch.testing.assert_close(losses["loss_loc"], ssd_case["loss/reg_loss"], rtol=1e-5, atol=0)
    torch.testing.assert_close(losses["loss_cls"], ssd_case["loss/cls_loss"], rtol=1e-5, atol=0)
    total = sum(losses.values())
    torch.testing.assert_close(total, ssd_case["loss/total_loss"], rtol=1e-5, atol=0)
    for ours, name in zip(torch.autograd.grad(total, (scores, regression)), ("scores", "box_regression"), strict=True):
        torch.testing.assert_close(ours, ssd_case[f"grad_{name}"], rtol=1e-5, atol=1e-7)


def test_self_weighting(golden):
    data = tensors(golden, "ssd_self_weighting")
    balance = SelfWeighting(int(data["max_monitor_iter"]), int(data["update_wt_freq"]))
    before = 1.0
    calls = zip(*(data[name] for name in ("scores", "boxes", "labels", "targets")), strict=True)
    for call, (scores, boxes, labels, targets) in enumerate(calls):
        cls_sum, loc_sum = multibox_loss(scores, boxes, labels, targets, ratio=3)
        # Here a step is weighted by what the steps before it gave, there by its own losses too.
        assert float(balance.weight) == pytest.approx(before, rel=1e-5)
        balance.observe(torch.tensor([cls_sum, loc_sum]))
        after = float(data["wt_loc_after"][call])
        assert float(balance.weight) == pytest.approx(after, rel=1e-5)
        positives = max(1, int((labels > 0).sum()))
        parts = [loc_sum * after / positives, cls_sum / positives]
        np.testing.assert_allclose([sum(parts), *parts], data["total_reg_cls"][call], rtol=1e-5)
        before = after
    assert not bool((labels == IGNORED_LABEL).any())
    assert len(set(data["wt_loc_after"].tolist())) > 1


class Linear:
    """The run of the traces with our parts; `theirs`: gradients summed, and the trailing micro-batches left out."""

    def __init__(self, case: dict, theirs: bool):
        options = {key.rpartition(".")[2]: value for key, value in case["options"].items()}
        self.options, self.theirs, self.step = options, theirs, 0
        self.model = nn.Linear(len(case["init_weight"]), 1).double()  # where a weight crosses 0, float32 leaves 1e-5
        with torch.no_grad():
            self.model.weight.copy_(torch.tensor([case["init_weight"]]))
            self.model.bias.fill_(case["init_bias"])
        self.batches = [[torch.tensor(b[key]).double() for key in ("samples", "targets")] for b in case["batches"]]
        self.ema = Ema(self.model, 1 - case["ema_momentum"], warmup=False)
        self.seen = []

    def lr(self) -> float:
        o = self.options
        lr = o["max_lr"] * lr_factor(
            self.step, "cosine", total_steps=o["max_iterations"] + 1, warmup_steps=o["warmup_iterations"],
            warmup_factor=o["warmup_init_lr"] / o["max_lr"], final_factor=o["min_lr"] / o["max_lr"],
        )  # fmt: skip
        return round(lr, 8) if self.theirs else lr

    def epoch(self, epoch: int) -> None:
        size = accumulation_at(epoch, self.options["accum_freq"], self.options["accum_after_epoch"])
        for window in windows(self.batches, size):
            counts = [{"samples": len(targets)} for _, targets in window]
            denominators = window_denominators(counts, "cpu")
            optimizer = torch.optim.SGD(self.model.parameters(), lr=self.lr())
            for (samples, targets), denominator in zip(window, denominators, strict=True):
                mean = F.mse_loss(self.model(samples), targets)
                self.seen.append((self.step, self.lr(), self.model.weight.detach().clone(), float(mean.detach())))
                loss = mean if self.theirs else mean * len(targets) / denominator["samples"]
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
    theirs, ours = (Linear(accumulation, theirs=theirs) for theirs in (True, False))
    accumulates = False
    for epoch, end in enumerate(accumulation["epoch_ends"]):
        size = accumulation_at(epoch, theirs.options["accum_freq"], theirs.options["accum_after_epoch"])
        accumulates |= size > 1
        before = ours.step
        theirs.epoch(epoch)
        ours.epoch(epoch)
        assert ours.step - before == -(-len(ours.batches) // size)  # every micro-batch counts
        assert theirs.step == end["train_iterations"]
        np.testing.assert_allclose(theirs.model.weight.detach()[0], end["weight"], rtol=1e-5)
        np.testing.assert_allclose(theirs.ema.module.weight[0], end["ema_weight"], rtol=1e-5)
        lost = len(ours.batches) % size
        left_over = end["leftover_grad_weight"]
        assert (left_over is not None and bool(np.any(left_over))) == bool(lost)
        if not accumulates:
            np.testing.assert_allclose(ours.model.weight.detach()[0], end["weight"], rtol=1e-5)
    assert len(theirs.seen) == len(accumulation["micro_batches"])
    for (step, lr, weight, loss), trace in zip(theirs.seen, accumulation["micro_batches"], strict=True):
        assert step == trace["train_iterations_seen"]
        assert lr == pytest.approx(trace["lr"], rel=1e-9)
        np.testing.assert_allclose(weight[0], trace["weight"], rtol=1e-5)
        assert loss == pytest.approx(trace["loss"], rel=1e-5)
    assert not accumulates or not torch.allclose(ours.model.weight, theirs.model.weight, rtol=1e-3)
