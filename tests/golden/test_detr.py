"""DETR against numbers of the original program (facebookresearch/detr), whose README defines every quantity.

    pytest tests/golden/test_detr.py --golden DIR

Every shape, weight and cost comes from the files in DIR.
"""

import copy
import json
import zlib
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from golden_files import arrays as golden_arrays
from golden_files import group as golden_group
from plain_training import plain_training
from processes import run_on_ranks
from torch import nn

from scripts import train_detr
from toolkit.base.box_ops import cxcywh_to_xyxy
from toolkit.base.distributed import reduce_dict
from toolkit.data.batches import collate
from toolkit.detectors.detr.detr_criterion import DetrCriterion, pad_targets
from toolkit.models import build_detector
from toolkit.run.metrics_log import read_metrics
from toolkit.step.losses import LossWeights, window_denominators
from toolkit.step.meters import Meters, SmoothedValue
from toolkit.step.optim import build_optimizer, parameter_groups
from toolkit.step.schedules import Schedule

load, group = partial(golden_arrays, program="detr"), partial(golden_group, after="/")


def run_case(case: dict[str, np.ndarray], dtype: torch.dtype) -> dict:
    """The criterion on one case: losses, metrics, total, gradients and matches, as the file names them."""
    logits = torch.tensor(case["logits"], dtype=dtype, requires_grad=True)
    boxes = torch.tensor(case["boxes"], dtype=dtype, requires_grad=True)
    costs = case["matcher_costs_class_bbox_giou"].tolist()
    criterion = DetrCriterion(int(case["num_classes"]), len(logits), float(case["eos_coef"]), costs)
    rows = zip(case["target_labels"], case["target_boxes"], case["num_targets"], strict=True)
    ones = {"size": torch.tensor([1, 1])}  # px, which are the fractions that the original's targets are given in
    targets = [ones | {"labels": torch.from_numpy(own[:n]), "boxes": cxcywh_to_xyxy(torch.from_numpy(found[:n]))}
               for own, found, n in rows]  # fmt: skip
    local = criterion.denominators(targets, logits.shape[2])
    (shared,) = window_denominators([local], "cpu", "original", averaged=("boxes",), dtype=dtype)
    losses, metrics = criterion(logits, boxes, targets, shared)
    weights = LossWeights(criterion.loss_names, {}, {"loss_ce": 1.0, "loss_bbox": 5.0, "loss_giou": 2.0})
    total = weights(losses, step=0).total
    total.backward()
    matches = criterion.match(logits.log_softmax(-1), boxes, pad_targets(targets, logits.device, dtype))
    return {
        "losses": {name: value.item() for name, value in losses.items()},
        "metrics": {name: (float(value), float(count)) for name, (value, count) in metrics.items()},
        "total": total.item(),
        "grad_logits": logits.grad.numpy(),
        "grad_boxes": boxes.grad.numpy(),
        "match": np.stack([part.numpy() for part in matches]),
    }


def assert_equals_original(result: dict, case: dict[str, np.ndarray], dtype: torch.dtype) -> None:
    double = dtype == torch.float64
    rtol, wanted = (1e-9, group(case, "loss")) if double else (1e-5, group(case, "loss_f32"))
    assert set(result["losses"]) | set(result["metrics"]) == set(wanted)
    for name, value in result["losses"].items():
        np.testing.assert_allclose(value, wanted[name], rtol=rtol, err_msg=name)
    for name, (value, count) in result["metrics"].items():
        if count == 0:  # the original says 100; a batch without objects has no class error
            assert name == "class_error" and wanted[name] == 100
        else:
            np.testing.assert_allclose(value / count, wanted[name], atol=1e-4, err_msg=name)
    np.testing.assert_allclose(result["total"], case["total" if double else "total_f32"], rtol=rtol)
    if double:
        np.testing.assert_allclose(result["grad_logits"], case["grad_logits"], rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(result["grad_boxes"], case["grad_boxes"], rtol=1e-6, atol=1e-9)
    match = case["match"]  # (layers, B, 2, T) padded with -1; ours has rows of layer, image, query, target
    layer, image, column = np.nonzero(match[:, :, 0] >= 0)
    rows = [layer, image, match[layer, image, 0, column], match[layer, image, 1, column]]
    np.testing.assert_array_equal(result["match"], np.stack(rows))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_criterion_equals_the_original(golden, dtype):
    arrays = load(golden, "criterion")
    cases = sorted({key.split("/")[0] for key in arrays})
    assert cases
    for name in cases:
        case = group(arrays, name)
        assert_equals_original(run_case(case, dtype), case, dtype)


def criterion_on_rank(folder: str, topic: str) -> dict:
    arrays = load(Path(folder), topic)
    rank = torch.distributed.get_rank()
    results = {dtype: run_case(group(arrays, f"rank{rank}"), dtype) for dtype in (torch.float64, torch.float32)}
    double = results[torch.float64]
    values = double["losses"] | {name: value / max(count, 1) for name, (value, count) in double["metrics"].items()}
    return {"results": results, "reduced": reduce_dict(values, list(values))}


def test_criterion_on_several_ranks_equals_the_original(golden):
    """`original` denominators: boxes shared over the ranks, class weights by rank; then the mean over the ranks."""
    files = sorted(golden.glob("detr_criterion_ranks*.npz"))
    assert files, f"no detr_criterion_ranks*.npz in {golden}"
    for path in files:
        topic = path.stem.removeprefix("detr_")
        arrays = load(golden, topic)
        ranks = run_on_ranks(criterion_on_rank, int(arrays["world_size"]), str(golden), topic)
        for rank, outcome in enumerate(ranks):
            case = group(arrays, f"rank{rank}")
            for dtype, result in outcome["results"].items():
                assert_equals_original(result, case, dtype)
            for name, value in group(arrays, "reduced").items():
                atol = 1e-4 if "error" in name else 0
                np.testing.assert_allclose(outcome["reduced"][name], value, rtol=1e-9, atol=atol, err_msg=name)


def test_postprocess_equals_the_original(golden):
    from toolkit.detectors.detr.detr import Detr  # here: the ranks above import this file, and need no transformers

    arrays = {key: torch.from_numpy(value) for key, value in load(golden, "postprocess").items()}
    outputs, sizes = {name: arrays[name][None] for name in ("logits", "boxes")}, arrays["target_sizes_hw"]
    detections = Detr.__new__(Detr).postprocess(outputs, sizes, sizes, score_threshold=-1.0)
    for image, detection in enumerate(detections):
        torch.testing.assert_close(detection["scores"], arrays["scores"][image], rtol=1e-5, atol=0)
        assert detection["labels"].tolist() == arrays["labels"][image].tolist()
        torch.testing.assert_close(detection["boxes"], arrays["out_boxes_xyxy"][image], rtol=1e-5, atol=1e-4)


def test_meters_equal_the_original(golden):
    reference = json.loads((golden / "detr_meters.json").read_text())
    for trace in reference["traces"]:
        meter = SmoothedValue(trace["window_size"], trace["fmt"])
        for i, (value, n) in enumerate(zip(reference["sequence"], reference["n"], strict=True)):
            meter.update(value, n)
            for statistic, tolerance in (
                ("median", 1e-6), ("avg", 1e-6), ("global_avg", 1e-12), ("max", 1e-12), ("value", 1e-12)
            ):  # fmt: skip
                assert getattr(meter, statistic) == pytest.approx(trace[statistic][i], abs=tolerance, rel=0)
            assert str(meter) == trace["str"][i]


def test_lines_of_meters_equal_the_original(golden):
    reference = json.loads((golden / "detr_meters.json").read_text())
    wanted = reference["metric_logger"]["str_after_each"]
    meters = Meters(lr=SmoothedValue(1, "{value:.6f}"), class_error=SmoothedValue(1, "{value:.2f}"))
    for i, line in enumerate(wanted):
        loss = reference["sequence"][i]
        meters.update(loss=loss, loss_ce=np.float32(0.5 * loss).item(), count=i)
        meters.update(class_error=100 * (i % 3) / 3)
        meters.update(lr=1e-4 if i <= 5 else 1e-5)
        assert str(meters) == line
    for name, value in reference["metric_logger"]["global_avg"].items():
        assert meters[name].global_avg == pytest.approx(value, abs=1e-12)


OPTIONS = {"hidden_dim": "d_model", "nheads": "heads", "enc_layers": "encoder_layers", "dec_layers": "decoder_layers",
           "dim_feedforward": "ffn_dim", "num_queries": "num_queries", "eos_coef": "eos_coef"}  # fmt: skip


def build_from(arrays: dict[str, np.ndarray]) -> nn.Module:
    """The detector of a trajectory file, with weights yet to be loaded."""
    config = config_of(arrays)
    options = {ours: config[theirs] for theirs, ours in OPTIONS.items()}
    names = [str(i) for i in range(config["num_classes"])]
    return build_detector("detr", class_names=names, backbone="resnet18", freeze="paper", dropout=0.0, **options)


def config_of(arrays: dict[str, np.ndarray]) -> dict:
    return {key: value.item() for key, value in group(arrays, "config").items()}


def recipe_weights(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, torch.Tensor]:
    """The README's formula: weights that depend on the parameter's name and the seed alone."""
    weights = {}
    for name, shape in shapes.items():
        state = np.random.RandomState((zlib.crc32(name.encode()) + seed) % 2**32)
        u = state.random_sample(int(np.prod(shape))).reshape(shape)
        in_backbone = name.startswith("model.backbone.")
        if in_backbone and len(shape) == 4:
            value = (2 * u - 1) * np.sqrt(6 / np.prod(shape[1:]))
        elif in_backbone:
            scale, offset = {"weight": (0.4, 0.4), "running_var": (1.0, 0.5)}.get(name.split(".")[-1], (0.2, -0.1))
            value = offset + scale * u
        elif "layer_norm." in name or "layernorm." in name:
            value = np.full(shape, float(name.endswith("weight")))
        elif name == "model.query_position_embeddings.weight":
            value = 1.7 * (2 * u - 1)
        elif len(shape) >= 2:
            value = (2 * u - 1) * np.sqrt(6 / (shape[0] + np.prod(shape[1:])))
        else:
            value = -0.05 + 0.1 * u
        weights[name] = torch.from_numpy(value.astype(np.float32))
    return weights


def load_recipe(detector: nn.Module, seed: int) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in detector.model.state_dict().items()}
    detector.model.load_state_dict(recipe_weights(shapes, seed))


def batches_of(arrays: dict[str, np.ndarray]) -> list:
    """One epoch's batches: consecutive images in the order of the file, padded to the largest of the batch."""
    samples, batch_size = [], int(arrays["config/batch_size"])
    for i, (height, width) in enumerate(arrays["image_sizes_hw"].tolist()):
        n, size = arrays["num_targets"][i], torch.tensor([height, width])
        boxes = cxcywh_to_xyxy(torch.from_numpy(arrays["target_boxes_cxcywh"][i, :n])) * size.flip(0).repeat(2)
        target = {"image_id": i, "boxes": boxes, "labels": torch.from_numpy(arrays["target_labels"][i, :n])}
        target |= {"iscrowd": torch.zeros(n, dtype=torch.int64), "size": size, "orig_size": size}
        samples.append((torch.from_numpy(arrays["images_uint8"][i, :, :height, :width]).contiguous(), target))
    return [collate(samples[start : start + batch_size]) for start in range(0, len(samples), batch_size)]


def predictions(detector: nn.Module, batches: list) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits (N, Q, C + 1) and boxes (N, Q, 4) of the last layer, for all images, in evaluation mode."""
    detector.eval()
    with torch.no_grad():
        outputs = [detector(batch.images, batch.sizes) for batch in batches]
    return tuple(torch.cat([output[key][-1] for output in outputs]) for key in ("logits", "boxes"))


def assert_state(detector: nn.Module, arrays: dict[str, np.ndarray], when: str, rtol: float) -> None:
    """Norm of every tensor of the model as in the original, `when` = init or final; what trains is what trained."""
    state = {name: t for name, t in detector.model.state_dict().items() if not name.endswith("num_batches_tracked")}
    assert sorted(state) == sorted(arrays["param_names_hf"].tolist())
    trainable = {name for name, parameter in detector.model.named_parameters() if parameter.requires_grad}
    for i, name in enumerate(arrays["param_names_hf"].tolist()):
        # Softmax does not feel a bias of the keys (nor, over equal values, of the queries): its gradient is rounding,
        # which Adam turns into steps of full size.
        atol = 1e-5 if name.endswith(("attn.k_proj.bias", "attn.q_proj.bias")) else 1e-12
        norm = state[name].double().norm().item()
        np.testing.assert_allclose(norm, arrays[f"param_norm_{when}"][i], rtol=rtol, atol=atol, err_msg=name)
        assert (name in trainable) == arrays["param_requires_grad"][i], name


def test_auxiliary_outputs_follow_the_original_where_transformers_does_not(golden):
    """With LayerNorms that are no longer 1 and 0, transformers' `auxiliary_loss=True` computes another model."""
    arrays, norms = load(golden, "trajectory_recipe"), load(golden, "decoder_norm")
    detector = build_from(arrays)
    load_recipe(detector, int(norms["recipe_seed"]))
    detector.model.load_state_dict({k: torch.from_numpy(v) for k, v in group(norms, "ln").items()}, strict=False)
    batch = batches_of(arrays)[0]

    detector.eval()
    outputs = detector(batch.images, batch.sizes)
    np.testing.assert_allclose(outputs["logits"].detach(), norms["logits"], atol=1e-4)
    np.testing.assert_allclose(outputs["boxes"].detach(), norms["boxes"], atol=1e-4)
    assert np.abs(norms["transformers_aux_true_logits"] - norms["logits"][-1]).max() > 0.1

    (shared,) = window_denominators([detector.denominators(batch.targets)], "cpu")
    losses, metrics = detector.criterion(outputs, batch.targets, shared)
    values = {**losses, **{name: value / count for name, (value, count) in metrics.items()}}
    for name, value in group(norms, "loss").items():
        np.testing.assert_allclose(values[name].item(), value, rtol=1e-4, err_msg=name)
    total = LossWeights(detector.loss_names, {}, detector.default_weights)(losses, step=0).total
    np.testing.assert_allclose(total.item(), norms["total_loss"], rtol=1e-4)

NAMES_IN_TRANSFORMERS = {
    "linear1": "mlp.fc1", "linear2": "mlp.fc2", "out_proj": "o_proj", "multihead_attn": "encoder_attn",
}  # fmt: skip
NORMS_IN_TRANSFORMERS = {
    "encoder": {"norm1": "self_attn_layer_norm", "norm2": "final_layer_norm"},
    "decoder": {"norm1": "self_attn_layer_norm", "norm2": "encoder_attn_layer_norm", "norm3": "final_layer_norm"},
}


def original_random_weights(config: dict, seed: int) -> dict[str, torch.Tensor]:
    """The state that facebookresearch/detr starts from after `torch.manual_seed(seed)`, by transformers' names.

    Its modules are made here in its order, so that they draw the same numbers: backbone, transformer (one layer each of
    encoder and decoder, then copied), Xavier over their matrices, heads, queries, projection.
    """
    d_model, heads, ffn = config["hidden_dim"], config["nheads"], config["dim_feedforward"]
    torch.manual_seed(seed)
    backbone = torchvision.models.resnet18()
    layers = {"encoder": nn.TransformerEncoderLayer(d_model, heads, ffn)}
    layers["decoder"] = nn.TransformerDecoderLayer(d_model, heads, ffn)
    stacks = {
        part: nn.ModuleList(copy.deepcopy(layer) for _ in range(config[f"{part[:3]}_layers"]))
        for part, layer in layers.items()
    }
    for parameter in (*stacks["encoder"].parameters(), *stacks["decoder"].parameters()):
        if parameter.dim() > 1:
            nn.init.xavier_uniform_(parameter)
    rest = {"class_labels_classifier": nn.Linear(d_model, config["num_classes"] + 1)}
    for i, outputs in enumerate((d_model, d_model, 4)):
        rest[f"bbox_predictor.layers.{i}"] = nn.Linear(d_model, outputs)
    rest["model.query_position_embeddings"] = nn.Embedding(config["num_queries"], d_model)
    rest["model.input_projection"] = nn.Conv2d(backbone.fc.in_features, d_model, kernel_size=1)
    rest["model.decoder.layernorm"] = nn.LayerNorm(d_model)

    weights = {f"model.backbone.model.{k}": v for k, v in backbone.state_dict().items() if not k.startswith("fc.")}
    for prefix, module in rest.items():
        weights |= {f"{prefix}.{key}": value for key, value in module.state_dict().items()}
    for part, stack in stacks.items():
        for key, value in stack.state_dict().items():
            weights |= in_transformers(part, key, value)
    return {name: value for name, value in weights.items() if not name.endswith("num_batches_tracked")}


def in_transformers(part: str, key: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
    """A tensor of the original's encoder or decoder under its name(s) in transformers; q, k, v are one tensor there."""
    names = NAMES_IN_TRANSFORMERS | NORMS_IN_TRANSFORMERS[part]
    path = ".".join(names.get(piece, piece) for piece in key.split("."))
    if "in_proj_" not in path:
        return {f"model.{part}.layers.{path}": value}
    stem, kind = path.split("in_proj_")
    thirds = zip("qkv", value.chunk(3), strict=True)
    return {f"model.{part}.layers.{stem}{letter}_proj.{kind}": third for letter, third in thirds}


def start_of_trajectory(arrays: dict[str, np.ndarray]) -> nn.Module:
    """The detector with the original's initial weights: those of the formula, or drawn as the original draws them."""
    detector = build_from(arrays)
    if "config/recipe_seed" in arrays:
        load_recipe(detector, int(arrays["config/recipe_seed"]))
        return detector
    config = config_of(arrays)
    detector.model.load_state_dict(original_random_weights(config, seed=5))
    return detector.double()  # see ROUNDING


@pytest.fixture(params=["trajectory_recipe", "trajectory"])
def trajectory(request, golden) -> dict[str, np.ndarray]:
    return load(golden, request.param)


# Relative, of losses and gradient norms, at each of the 30 steps. From the formula's weights float32 rounds them by at
# most 6e-7 (measured with AVX2 and without vector instructions, on one thread). From random weights it multiplies what
# rounding does by ten every two or three steps, and no bound on the late ones says anything: the gradient norm of step
# 24 is off by 1e-6 (SSE, or two threads), 4e-4 (AVX2) or 2e-1 (torch without vector instructions). So that one is run
# in float64, where nothing is left but the original's own rounding, the same on every machine: 8e-7, and 7e-8 of what
# the original computes in float64 itself.
ROUNDING, ROUNDING_FLOAT64 = 5e-6, 1.5e-7


def assert_start(detector: nn.Module, arrays: dict[str, np.ndarray]) -> None:
    assert_state(detector, arrays, "init", rtol=1e-6)
    state = detector.model.state_dict()
    sums = [state[name].double().sum().item() for name in arrays["param_names_hf"].tolist()]
    np.testing.assert_allclose(sums, arrays["param_sum_init"], rtol=1e-5, atol=1e-5)
    logits, boxes = predictions(detector, batches_of(arrays))
    np.testing.assert_allclose(logits, arrays["init_logits"], atol=1e-4)
    np.testing.assert_allclose(boxes, arrays["init_boxes"], atol=1e-4)


def assert_trajectory(rows: list[dict[str, float]], detector: nn.Module, arrays: dict[str, np.ndarray]) -> None:
    """Losses and gradient norm of every step, then the final weights and predictions, as in the original.

    rows: per step, `train/loss`, `train/grad_norm`, and per loss `train/<name>` and `train/<name>_unscaled`.
    """
    steps = group(arrays, "step")
    assert len(rows) == len(steps["loss"])
    names = ["loss", "grad_norm", *(f"{name}{kind}" for name in detector.loss_names for kind in ("", "_unscaled"))]
    traces = {name: [row[f"train/{name}"] for row in rows] for name in (*names, *detector.metric_names)}
    for name in names:
        np.testing.assert_allclose(traces[name], steps[name], rtol=ROUNDING, err_msg=name)
    for name, exact in group(arrays, "step_f64").items() if detector.model.dtype == torch.float64 else ():
        np.testing.assert_allclose(traces[name], exact, rtol=ROUNDING_FLOAT64, err_msg=f"{name}, in float64")
    for name in detector.metric_names:
        np.testing.assert_allclose(traces[name], steps[f"{name}_unscaled"], atol=1e-4, err_msg=name)
    assert_state(detector, arrays, "final", rtol=1e-6)
    for name, value in group(arrays, "final").items():
        np.testing.assert_allclose(detector.model.state_dict()[name], value, atol=1e-5, err_msg=name)
    logits, boxes = predictions(detector, batches_of(arrays))
    np.testing.assert_allclose(logits, arrays["final_logits"], atol=2e-5)
    np.testing.assert_allclose(boxes, arrays["final_boxes"], atol=2e-5)


def test_train_one_epoch_follows_the_original_step_by_step(trajectory, tmp_path):
    """The loop of scripts/train_detr.py itself, 30 steps from the original's weights, in its two groups of rates."""
    config = config_of(trajectory)
    detector, batches = start_of_trajectory(trajectory), batches_of(trajectory)
    assert_start(detector, trajectory)
    rates = {"lr": config["lr"], "backbone_lr": config["lr_backbone"], "weight_decay": config["weight_decay"]}
    total_steps, step_size = config["epochs"] * len(batches), config["lr_drop_epochs"] * len(batches)
    t = plain_training(
        detector, batches, build_optimizer("adamw", parameter_groups(detector, **rates)),
        lambda optimizer: Schedule(optimizer, "step", total_steps, step_size=step_size, gamma=0.1), tmp_path,
        total_steps=total_steps, max_norm=config["clip_max_norm"],
    )  # fmt: skip
    epochs = []
    while not t.finished:
        epochs.append(train_detr.train_one_epoch(t))
    t.log.close()
    everything = read_metrics(tmp_path / "metrics.jsonl")
    rows = [row for row in everything if "train/loss" in row]
    assert_trajectory(rows, detector, trajectory)
    np.testing.assert_allclose([row["train/lr/main"] for row in rows], trajectory["step/lr"], rtol=1e-12)
    assert_epoch_averages(epochs, [row for row in everything if "epoch/loss" in row], trajectory)


def assert_epoch_averages(epochs: list[dict[str, float]], rows: list[dict], arrays: dict[str, np.ndarray]) -> None:
    """What `train_one_epoch` returns, and the rows of the epochs, are the original's averages."""
    wanted = group(arrays, "epoch_avg")
    assert len(epochs) == len(rows) == len(wanted["loss"])
    for theirs, averages in wanted.items():
        ours = theirs.removesuffix("_unscaled") if "error" in theirs else theirs
        if theirs != "lr":
            atol = 1e-4 if "error" in ours else 0
            np.testing.assert_allclose([e[ours] for e in epochs], averages, rtol=ROUNDING, atol=atol, err_msg=theirs)
            assert [row[f"epoch/{ours}"] for row in rows] == [e[ours] for e in epochs]
