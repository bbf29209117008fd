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
from golden_files import Arrays, Tensors, read_tensors
from golden_files import arrays as golden_arrays
from golden_files import group as golden_group
from numpy.testing import assert_allclose, assert_array_equal
from plain_training import plain_training
from processes import run_on_ranks
from pytest import approx
from torch import Tensor, nn
from torch.testing import assert_close

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

load = partial(golden_arrays, program="detr")
group = partial(golden_group, after="/")


def targets_of(case: Arrays) -> list[dict]:
    targets = []
    for i, n in enumerate(case["num_targets"]):
        labels = torch.from_numpy(case["target_labels"][i, :n])
        boxes = torch.from_numpy(case["target_boxes"][i, :n])
        target = {
            "labels": labels,
            "boxes": cxcywh_to_xyxy(boxes),
            "size": torch.tensor([1, 1]),  # px, which are the fractions that the original's targets are given in
        }
        targets.append(target)
    return targets


def run_case(case: Arrays, dtype: torch.dtype) -> dict:
    """The criterion on one case: losses, metrics, total, gradients and matches, as the file names them."""
    logits = torch.tensor(case["logits"], dtype=dtype, requires_grad=True)
    boxes = torch.tensor(case["boxes"], dtype=dtype, requires_grad=True)
    criterion = DetrCriterion(
        int(case["num_classes"]),
        len(logits),
        float(case["eos_coef"]),
        case["matcher_costs_class_bbox_giou"].tolist(),
    )
    targets = targets_of(case)
    local = criterion.denominators(targets, logits.shape[2])
    (shared,) = window_denominators([local], "cpu", "original", averaged=("boxes",), dtype=dtype)
    losses, metrics = criterion(logits, boxes, targets, shared)
    defaults = {"loss_ce": 1.0, "loss_bbox": 5.0, "loss_giou": 2.0}
    weights = LossWeights(criterion.loss_names, {}, defaults)
    total = weights(losses, step=0).total
    total.backward()
    padded = pad_targets(targets, logits.device, dtype)
    matches = criterion.match(logits.log_softmax(-1), boxes, padded)
    return {
        "losses": {name: value.item() for name, value in losses.items()},
        "metrics": {name: (float(value), float(count)) for name, (value, count) in metrics.items()},
        "total": total.item(),
        "grad_logits": logits.grad.numpy(),
        "grad_boxes": boxes.grad.numpy(),
        "match": torch.stack(matches).numpy(),
    }


def assert_equals_original(result: dict, case: Arrays, dtype: torch.dtype) -> None:
    double = dtype == torch.float64
    ending = "" if double else "_f32"
    rtol = 1e-9 if double else 1e-5
    wanted = group(case, f"loss{ending}")
    losses = result["losses"]
    metrics = result["metrics"]
    assert losses.keys() | metrics.keys() == wanted.keys()
    for name, value in losses.items():
        assert_allclose(value, wanted[name], rtol=rtol, err_msg=name)
    for name, (value, count) in metrics.items():
        if count == 0:  # the original says 100; a batch without objects has no class error
            assert name == "class_error"
            assert wanted[name] == 100
        else:
            assert_allclose(value / count, wanted[name], atol=1e-4, err_msg=name)
    assert_allclose(result["total"], case[f"total{ending}"], rtol=rtol)
    if double:
        assert_allclose(result["grad_logits"], case["grad_logits"], rtol=1e-9, atol=1e-12)
        assert_allclose(result["grad_boxes"], case["grad_boxes"], rtol=1e-6, atol=1e-9)
    # (layers, B, 2, T) padded with -1; ours has rows of layer, image, query, target
    queries, objects = case["match"].transpose(2, 0, 1, 3)
    places = np.nonzero(queries >= 0)
    layer, image, _ = places
    rows = [layer, image, queries[places], objects[places]]
    assert_array_equal(result["match"], np.stack(rows))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_criterion_equals_the_original(golden, dtype):
    arrays = load(golden, "criterion")
    cases = {key.split("/")[0] for key in arrays}
    assert cases
    for name in sorted(cases):
        case = group(arrays, name)
        result = run_case(case, dtype)
        assert_equals_original(result, case, dtype)


def criterion_on_rank(folder: str, topic: str) -> dict:
    arrays = load(Path(folder), topic)
    rank = torch.distributed.get_rank()
    case = group(arrays, f"rank{rank}")
    double = run_case(case, torch.float64)
    single = run_case(case, torch.float32)
    values = dict(double["losses"])
    for name, (value, count) in double["metrics"].items():
        values[name] = value / max(count, 1)
    return {
        "results": {torch.float64: double, torch.float32: single},
        "reduced": reduce_dict(values, list(values)),
    }


def test_criterion_on_several_ranks_equals_the_original(golden):
    """`original` denominators: boxes shared over the ranks, class weights by rank; then the mean over the ranks."""
    files = sorted(golden.glob("detr_criterion_ranks*.npz"))
    assert files, f"no detr_criterion_ranks*.npz in {golden}"
    for path in files:
        topic = path.stem.removeprefix("detr_")
        arrays = load(golden, topic)
        world_size = int(arrays["world_size"])
        wanted = group(arrays, "reduced")
        outcomes = run_on_ranks(criterion_on_rank, world_size, str(golden), topic)
        for rank, outcome in enumerate(outcomes):
            case = group(arrays, f"rank{rank}")
            for dtype, result in outcome["results"].items():
                assert_equals_original(result, case, dtype)
            for name, value in wanted.items():
                atol = 1e-4 if "error" in name else 0
                reduced = outcome["reduced"][name]
                assert_allclose(reduced, value, rtol=1e-9, atol=atol, err_msg=name)


def test_postprocess_equals_the_original(golden):
    from toolkit.detectors.detr.detr import Detr  # here: the ranks above import this file, and need no transformers

    given = read_tensors(golden, "postprocess", program="detr")
    outputs = {"logits": given["logits"][None], "boxes": given["boxes"][None]}
    sizes = given["target_sizes_hw"]
    detr = Detr.__new__(Detr)
    detections = detr.postprocess(outputs, sizes, sizes, score_threshold=-1.0)
    for image, detection in enumerate(detections):
        assert_close(detection["scores"], given["scores"][image], rtol=1e-5, atol=0)
        assert detection["labels"].tolist() == given["labels"][image].tolist()
        expected = given["out_boxes_xyxy"][image]
        assert_close(detection["boxes"], expected, rtol=1e-5, atol=1e-4)


@pytest.fixture
def meters_json(golden) -> dict:
    path = golden / "detr_meters.json"
    return json.loads(path.read_text())


TOLERANCES = {
    "median": 1e-6,
    "avg": 1e-6,
    "global_avg": 1e-12,
    "max": 1e-12,
    "value": 1e-12,
}


def test_meters_equal_the_original(meters_json):
    updates = list(zip(meters_json["sequence"], meters_json["n"], strict=True))
    for trace in meters_json["traces"]:
        meter = SmoothedValue(trace["window_size"], trace["fmt"])
        for i, (value, n) in enumerate(updates):
            meter.update(value, n)
            for statistic, tolerance in TOLERANCES.items():
                expected = trace[statistic][i]
                assert getattr(meter, statistic) == approx(expected, abs=tolerance, rel=0)
            assert str(meter) == trace["str"][i]


def test_lines_of_meters_equal_the_original(meters_json):
    wanted = meters_json["metric_logger"]
    meters = Meters(
        lr=SmoothedValue(1, "{value:.6f}"),
        class_error=SmoothedValue(1, "{value:.2f}"),
    )
    for i, line in enumerate(wanted["str_after_each"]):
        loss = meters_json["sequence"][i]
        half = np.float32(0.5 * loss)
        meters.update(loss=loss, loss_ce=half.item(), count=i)
        meters.update(class_error=100 * (i % 3) / 3)
        meters.update(lr=1e-4 if i <= 5 else 1e-5)
        assert str(meters) == line
    for name, value in wanted["global_avg"].items():
        assert meters[name].global_avg == approx(value, abs=1e-12)


def build_from(arrays: Arrays) -> nn.Module:
    """The detector of a trajectory file, with weights yet to be loaded."""
    config = config_of(arrays)
    return build_detector(
        "detr",
        class_names=[str(i) for i in range(config["num_classes"])],
        backbone="resnet18",
        freeze="paper",
        dropout=0.0,
        d_model=config["hidden_dim"],
        heads=config["nheads"],
        encoder_layers=config["enc_layers"],
        decoder_layers=config["dec_layers"],
        ffn_dim=config["dim_feedforward"],
        num_queries=config["num_queries"],
        eos_coef=config["eos_coef"],
    )


def config_of(arrays: Arrays) -> dict:
    return {key: value.item() for key, value in group(arrays, "config").items()}


BACKBONE_RANGES = {"weight": (0.4, 0.4), "running_var": (1.0, 0.5)}  # of vectors: width and start


def recipe_weight(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """The README's formula: weights that depend on the parameter's name and the seed alone."""
    checksum = zlib.crc32(name.encode())
    state = np.random.RandomState((checksum + seed) % 2**32)
    elements = int(np.prod(shape))
    u = state.random_sample(elements).reshape(shape)
    from_minus_one = 2 * u - 1
    fan_in = np.prod(shape[1:])
    in_backbone = name.startswith("model.backbone.")
    if in_backbone and len(shape) == 4:
        value = from_minus_one * np.sqrt(6 / fan_in)
    elif in_backbone:
        leaf = name.split(".")[-1]
        width, start = BACKBONE_RANGES.get(leaf, (0.2, -0.1))
        value = start + width * u
    elif "layer_norm." in name or "layernorm." in name:
        is_weight = name.endswith("weight")
        value = np.full(shape, float(is_weight))
    elif name == "model.query_position_embeddings.weight":
        value = 1.7 * from_minus_one
    elif len(shape) >= 2:
        value = from_minus_one * np.sqrt(6 / (shape[0] + fan_in))
    else:
        value = -0.05 + 0.1 * u
    return torch.from_numpy(value.astype(np.float32))


def load_recipe(detector: nn.Module, seed: int) -> None:
    weights = {}
    for name, tensor in detector.model.state_dict().items():
        weights[name] = recipe_weight(name, tuple(tensor.shape), seed)
    detector.model.load_state_dict(weights)


def batches_of(arrays: Arrays) -> list:
    """One epoch's batches: consecutive images in the order of the file, padded to the largest of the batch."""
    samples = []
    for i, (height, width) in enumerate(arrays["image_sizes_hw"].tolist()):
        n = arrays["num_targets"][i]
        size = torch.tensor([height, width])
        boxes = torch.from_numpy(arrays["target_boxes_cxcywh"][i, :n])
        image = torch.from_numpy(arrays["images_uint8"][i, :, :height, :width])
        target = {
            "image_id": i,
            "boxes": cxcywh_to_xyxy(boxes) * size.flip(0).repeat(2),
            "labels": torch.from_numpy(arrays["target_labels"][i, :n]),
            "iscrowd": torch.zeros(n, dtype=torch.int64),
            "size": size,
            "orig_size": size,
        }
        samples.append((image.contiguous(), target))
    batches = []
    batch_size = int(arrays["config/batch_size"])
    for start in range(0, len(samples), batch_size):
        batch = collate(samples[start : start + batch_size])
        batches.append(batch)
    return batches


def predictions(detector: nn.Module, batches: list) -> tuple[Tensor, Tensor]:
    """Logits (N, Q, C + 1) and boxes (N, Q, 4) of the last layer, for all images, in evaluation mode."""
    detector.eval()
    logits = []
    boxes = []
    with torch.no_grad():
        for batch in batches:
            outputs = detector(batch.images, batch.sizes)
            logits.append(outputs["logits"][-1])
            boxes.append(outputs["boxes"][-1])
    return torch.cat(logits), torch.cat(boxes)


def without_counters(state: Tensors) -> Tensors:
    """A state dict without what the original's frozen norms do not have."""
    return {name: value for name, value in state.items() if not name.endswith("num_batches_tracked")}


def assert_state(detector: nn.Module, arrays: Arrays, when: str, rtol: float) -> None:
    """Norm of every tensor of the model as in the original, `when` = init or final; what trains is what trained."""
    state = without_counters(detector.model.state_dict())
    names = arrays["param_names_hf"].tolist()
    assert sorted(state) == sorted(names)
    parameters = dict(detector.model.named_parameters())
    for i, name in enumerate(names):
        # Softmax does not feel a bias of the keys (nor, over equal values, of the queries): its gradient is rounding,
        # which Adam turns into steps of full size.
        atol = 1e-5 if name.endswith(("attn.k_proj.bias", "attn.q_proj.bias")) else 1e-12
        norm = state[name].double().norm().item()
        expected = arrays[f"param_norm_{when}"][i]
        assert_allclose(norm, expected, rtol=rtol, atol=atol, err_msg=name)
        trains = name in parameters and parameters[name].requires_grad
        assert trains == arrays["param_requires_grad"][i], name


def test_auxiliary_outputs_follow_the_original_where_transformers_does_not(golden):
    """With LayerNorms that are no longer 1 and 0, transformers' `auxiliary_loss=True` computes another model."""
    arrays = load(golden, "trajectory_recipe")
    norms = load(golden, "decoder_norm")
    detector = build_from(arrays)
    load_recipe(detector, int(norms["recipe_seed"]))
    changed = read_tensors(golden, "decoder_norm", "ln/", "detr")
    detector.model.load_state_dict(changed, strict=False)
    batch = batches_of(arrays)[0]

    detector.eval()
    outputs = detector(batch.images, batch.sizes)
    assert_allclose(outputs["logits"].detach(), norms["logits"], atol=1e-4)
    assert_allclose(outputs["boxes"].detach(), norms["boxes"], atol=1e-4)
    last = norms["logits"][-1]
    difference = norms["transformers_aux_true_logits"] - last
    assert np.abs(difference).max() > 0.1

    local = detector.denominators(batch.targets)
    (shared,) = window_denominators([local], "cpu")
    losses, metrics = detector.criterion(outputs, batch.targets, shared)
    values = dict(losses)
    for name, (value, count) in metrics.items():
        values[name] = value / count
    for name, value in group(norms, "loss").items():
        assert_allclose(values[name].item(), value, rtol=1e-4, err_msg=name)
    weights = LossWeights(detector.loss_names, {}, detector.default_weights)
    total = weights(losses, step=0).total
    assert_allclose(total.item(), norms["total_loss"], rtol=1e-4)


NAMES_IN_TRANSFORMERS = {
    "linear1": "mlp.fc1",
    "linear2": "mlp.fc2",
    "out_proj": "o_proj",
    "multihead_attn": "encoder_attn",
    "norm1": "self_attn_layer_norm",
}
NORMS_IN_TRANSFORMERS = {
    "encoder": {"norm2": "final_layer_norm"},
    "decoder": {"norm2": "encoder_attn_layer_norm", "norm3": "final_layer_norm"},
}


def original_random_weights(config: dict, seed: int) -> Tensors:
    """The state that facebookresearch/detr starts from after `torch.manual_seed(seed)`, by transformers' names.

    Its modules are made here in its order, so that they draw the same numbers: backbone, transformer (one layer each of
    encoder and decoder, then copied), Xavier over their matrices, heads, queries, projection.
    """
    d_model = config["hidden_dim"]
    heads = config["nheads"]
    ffn = config["dim_feedforward"]
    torch.manual_seed(seed)
    backbone = torchvision.models.resnet18()
    encoder = copies(nn.TransformerEncoderLayer(d_model, heads, ffn), config["enc_layers"])
    decoder = copies(nn.TransformerDecoderLayer(d_model, heads, ffn), config["dec_layers"])
    for parameter in (*encoder.parameters(), *decoder.parameters()):
        if parameter.dim() > 1:
            nn.init.xavier_uniform_(parameter)
    rest = {
        "class_labels_classifier": nn.Linear(d_model, config["num_classes"] + 1),
        "bbox_predictor.layers.0": nn.Linear(d_model, d_model),
        "bbox_predictor.layers.1": nn.Linear(d_model, d_model),
        "bbox_predictor.layers.2": nn.Linear(d_model, 4),
        "model.query_position_embeddings": nn.Embedding(config["num_queries"], d_model),
        "model.input_projection": nn.Conv2d(backbone.fc.in_features, d_model, kernel_size=1),
        "model.decoder.layernorm": nn.LayerNorm(d_model),
    }

    weights = {}
    for key, value in backbone.state_dict().items():
        if not key.startswith("fc."):
            weights[f"model.backbone.model.{key}"] = value
    for prefix, module in rest.items():
        for key, value in module.state_dict().items():
            weights[f"{prefix}.{key}"] = value
    for key, value in encoder.state_dict().items():
        weights |= in_transformers("encoder", key, value)
    for key, value in decoder.state_dict().items():
        weights |= in_transformers("decoder", key, value)
    return without_counters(weights)


def copies(layer: nn.Module, count: int) -> nn.ModuleList:
    return nn.ModuleList(copy.deepcopy(layer) for _ in range(count))


def in_transformers(part: str, key: str, value: Tensor) -> Tensors:
    """A tensor of the original's encoder or decoder under its name(s) in transformers; q, k, v are one tensor there."""
    names = NAMES_IN_TRANSFORMERS | NORMS_IN_TRANSFORMERS[part]
    pieces = [names.get(piece, piece) for piece in key.split(".")]
    name = f"model.{part}.layers." + ".".join(pieces)
    if "in_proj_" not in name:
        return {name: value}
    stem, kind = name.split("in_proj_")
    q, k, v = value.chunk(3)
    return {
        f"{stem}q_proj.{kind}": q,
        f"{stem}k_proj.{kind}": k,
        f"{stem}v_proj.{kind}": v,
    }


def start_of_trajectory(arrays: Arrays) -> nn.Module:
    """The detector with the original's initial weights: those of the formula, or drawn as the original draws them."""
    detector = build_from(arrays)
    config = config_of(arrays)
    if "recipe_seed" in config:
        load_recipe(detector, config["recipe_seed"])
        return detector
    detector.model.load_state_dict(original_random_weights(config, seed=5))
    return detector.double()  # see ROUNDING


@pytest.fixture(params=["trajectory_recipe", "trajectory"])
def trajectory(request, golden) -> Arrays:
    return load(golden, request.param)


# Relative, of losses and gradient norms, at each of the 30 steps. From the formula's weights float32 rounds them by at
# most 6e-7 (measured with AVX2 and without vector instructions, on one thread). From random weights it multiplies what
# rounding does by ten every two or three steps, and no bound on the late ones says anything: the gradient norm of step
# 24 is off by 1e-6 (SSE, or two threads), 4e-4 (AVX2) or 2e-1 (torch without vector instructions). So that one is run
# in float64, where nothing is left but the original's own rounding, the same on every machine: 8e-7, and 7e-8 of what
# the original computes in float64 itself.
ROUNDING = 5e-6
ROUNDING_FLOAT64 = 1.5e-7


def assert_start(detector: nn.Module, arrays: Arrays) -> None:
    assert_state(detector, arrays, "init", rtol=1e-6)
    state = detector.model.state_dict()
    sums = []
    for name in arrays["param_names_hf"].tolist():
        sums.append(state[name].double().sum().item())
    assert_allclose(sums, arrays["param_sum_init"], rtol=1e-5, atol=1e-5)
    logits, boxes = predictions(detector, batches_of(arrays))
    assert_allclose(logits, arrays["init_logits"], atol=1e-4)
    assert_allclose(boxes, arrays["init_boxes"], atol=1e-4)


def traces_of(rows: list[dict], names: list[str]) -> dict[str, list[float]]:
    traces = {}
    for name in names:
        traces[name] = [row[f"train/{name}"] for row in rows]
    return traces


def assert_trajectory(rows: list[dict[str, float]], detector: nn.Module, arrays: Arrays) -> None:
    """Losses and gradient norm of every step, then the final weights and predictions, as in the original.

    rows: per step, `train/loss`, `train/grad_norm`, and per loss `train/<name>` and `train/<name>_unscaled`.
    """
    steps = group(arrays, "step")
    assert len(rows) == len(steps["loss"])
    names = ["loss", "grad_norm"]
    for name in detector.loss_names:
        names += [name, f"{name}_unscaled"]
    traces = traces_of(rows, names)
    for name, trace in traces.items():
        assert_allclose(trace, steps[name], rtol=ROUNDING, err_msg=name)
    metrics = traces_of(rows, detector.metric_names)
    for name, trace in metrics.items():
        assert_allclose(trace, steps[f"{name}_unscaled"], atol=1e-4, err_msg=name)
    if detector.model.dtype == torch.float64:
        everything = traces | metrics
        for name, exact in group(arrays, "step_f64").items():
            assert_allclose(everything[name], exact, rtol=ROUNDING_FLOAT64, err_msg=f"{name}, in float64")
    assert_state(detector, arrays, "final", rtol=1e-6)
    state = detector.model.state_dict()
    for name, value in group(arrays, "final").items():
        assert_allclose(state[name], value, atol=1e-5, err_msg=name)
    logits, boxes = predictions(detector, batches_of(arrays))
    assert_allclose(logits, arrays["final_logits"], atol=2e-5)
    assert_allclose(boxes, arrays["final_boxes"], atol=2e-5)


def test_train_one_epoch_follows_the_original_step_by_step(trajectory, tmp_path):
    """The loop of scripts/train_detr.py itself, 30 steps from the original's weights, in its two groups of rates."""
    config = config_of(trajectory)
    detector = start_of_trajectory(trajectory)
    batches = batches_of(trajectory)
    assert_start(detector, trajectory)
    groups = parameter_groups(
        detector,
        lr=config["lr"],
        backbone_lr=config["lr_backbone"],
        weight_decay=config["weight_decay"],
    )
    total_steps = config["epochs"] * len(batches)
    step_size = config["lr_drop_epochs"] * len(batches)
    t = plain_training(
        detector,
        batches,
        build_optimizer("adamw", groups),
        lambda optimizer: Schedule(optimizer, "step", total_steps, step_size=step_size, gamma=0.1),
        tmp_path,
        total_steps=total_steps,
        max_norm=config["clip_max_norm"],
    )
    epochs = []
    while not t.finished:
        averages = train_detr.train_one_epoch(t)
        epochs.append(averages)
    t.log.close()
    everything = read_metrics(tmp_path / "metrics.jsonl")
    rows = [row for row in everything if "train/loss" in row]
    assert_trajectory(rows, detector, trajectory)
    rates = [row["train/lr/main"] for row in rows]
    assert_allclose(rates, trajectory["step/lr"], rtol=1e-12)
    rows_of_epochs = [row for row in everything if "epoch/loss" in row]
    assert_epoch_averages(epochs, rows_of_epochs, trajectory)


def assert_epoch_averages(epochs: list[dict[str, float]], rows: list[dict], arrays: Arrays) -> None:
    """What `train_one_epoch` returns, and the rows of the epochs, are the original's averages."""
    wanted = group(arrays, "epoch_avg")
    assert len(epochs) == len(rows) == len(wanted["loss"])
    for theirs, expected in wanted.items():
        if theirs == "lr":
            continue
        is_error = "error" in theirs
        name = theirs.removesuffix("_unscaled") if is_error else theirs
        returned = [averages[name] for averages in epochs]
        atol = 1e-4 if is_error else 0
        assert_allclose(returned, expected, rtol=ROUNDING, atol=atol, err_msg=theirs)
        assert [row[f"epoch/{name}"] for row in rows] == returned
