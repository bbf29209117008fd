"""Scene graphs against the numbers of Scene-Graph-Benchmark; every group and case is enumerated from the files."""

import json
import re
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from golden_files import (
    Arrays,
    Tensors,
    arrays,
    cases_of,
    close,
    document,
    ending,
    group,
    parametrize,
    per_object,
    prefixes,
    read_tensors,
    rows_of,
    tensors,
    within,
    without_ending,
)
from numpy.testing import assert_allclose, assert_array_equal
from sgg_heads import build_head, head_batch
from torch import Generator, Tensor

from toolkit.base.batch import pad_rows
from toolkit.base.boxes import Boxes
from toolkit.base.errors import BadInput
from toolkit.data.annotations import Reading
from toolkit.detectors.scene_graphs import frequency, pair_sampling, postprocess
from toolkit.detectors.scene_graphs.box_features import (
    box_numbers,
    certain_logits,
    iou_plus_one,
    overlap_numbers,
    pair_numbers,
    reading_order,
    rectangle_masks,
    scaled_box_numbers,
    union_boxes,
)
from toolkit.detectors.scene_graphs.heads.layers import label_embedding
from toolkit.detectors.scene_graphs.metrics import evaluate_scene_graphs
from toolkit.detectors.scene_graphs.readers import visual_genome as vg
from toolkit.detectors.scene_graphs.relation_batch import (
    RelationBatch,
    RelationOutput,
    attribute_loss,
    attribute_targets,
    head_losses,
    mean_or_zero,
    object_mask,
    predicate_loss,
)
from toolkit.detectors.scene_graphs.weights_scene_graph_benchmark import our_name
from toolkit.evaluation.coco_numbers import exact_numbers
from toolkit.evaluation.matches import match_boxes
from toolkit.evaluation.shown_metrics import COCO_METRICS
from toolkit.models.weights.mapping import map_weights
from toolkit.step.optim import gradient_norm, gradient_table, parameter_groups
from toolkit.step.schedules import PlateauSchedule, lr_factor, warm_up

DRAWN = "train_relation_map_values_over_40_draws"


def heads_in(folder: Path) -> list[str]:
    return sorted(path.stem.removeprefix("sgg_head_") for path in folder.glob("sgg_head_*.npz"))


def tree_heads_in(folder: Path) -> list[str]:
    heads = []
    for head in heads_in(folder):
        if any("tree_root" in key for key in arrays(folder, f"head_{head}")):
            heads.append(head)
    return heads


def sampling_images_in(folder: Path) -> list[str]:
    images = []
    for name in prefixes(folder, "sampling", 2):
        if not name.startswith("test_pairs") and not name.endswith("params"):
            images.append(name)
    return images


def postprocess_cases_in(folder: Path) -> list[str]:
    keys = arrays(folder, "postprocess")
    cases = [key.split(".img")[0] for key in keys if ".img" in key]
    return list(dict.fromkeys(cases))


def pytest_generate_tests(metafunc):
    folder = metafunc.config.getoption("golden")
    cases = {
        "schedule_case": lambda: list(document(folder, "schedule")["cases"]),
        "clip_case": lambda: prefixes(folder, "clip_grad"),
        "head": lambda: heads_in(folder),
        "tree_head": lambda: tree_heads_in(folder),
        "dataset_split": lambda: ending(folder, "dataset", ".split_mask"),
        "train_split": lambda: ending(folder, "dataset", f".{DRAWN}"),
        "evaluator_group": lambda: prefixes(folder, "evaluator"),
        "union_box_group": lambda: ending(folder, "evaluator", ".phrdet_R"),
        "box_group": lambda: ending(folder, "evaluator", ".coco_stats"),
        "sampling_image": lambda: sampling_images_in(folder),
        "postprocess_case": lambda: postprocess_cases_in(folder),
    }
    parametrize(metafunc, cases)


def scene_graphs(case: Arrays) -> tuple[list[dict], list[dict]]:
    truths = []
    predictions = []
    for i in range(len(case["image_size_wh"])):
        labels = rows_of(case["gt_classes"], case["gt_ptr"], i)
        relations = rows_of(case["gt_rels"], case["gt_rel_ptr"], i)
        truth = {
            "boxes": rows_of(case["gt_boxes"], case["gt_ptr"], i),
            "labels": labels - 1,
            "relations": relations - [0, 0, 1],
        }
        truths.append(truth)
        labels = rows_of(case["pred_labels"], case["pred_ptr"], i)
        scores = rows_of(case["rel_scores"], case["rel_ptr"], i)
        prediction = {
            "boxes": rows_of(case["pred_boxes"], case["pred_ptr"], i),
            "labels": labels - 1,
            "scores": rows_of(case["pred_scores"], case["pred_ptr"], i),
            "pairs": rows_of(case["rel_pair_idxs"], case["rel_ptr"], i),
            "predicate_scores": scores[:, 1:],
        }
        predictions.append(prediction)
    return truths, predictions


def evaluator_case(golden: Path, name: str) -> tuple[Arrays, str, dict]:
    data = arrays(golden, "evaluator")
    case = group(data, name)
    options = {
        "num_predicates": int(data["num_rel_classes_with_bg"]) - 1,
        "top": tuple(data["K"].tolist()),
        "iou_threshold": float(data["iou_threshold"]),
        "zero_shot": case["zeroshot_triplets_sub_obj_pred"] - 1,
    }
    mode = str(case.get("mode", name))
    return case, mode, options


def same_numbers(ours, theirs, name: str = "") -> None:
    assert_allclose(ours, theirs, rtol=0, atol=1e-9, err_msg=name)


def test_evaluator(golden, evaluator_group):
    case, mode, options = evaluator_case(golden, evaluator_group)
    metrics = evaluate_scene_graphs(*scene_graphs(case), mode=mode, **options)
    checked = set()
    for name, value in metrics.values.items():
        key = "fork_F1" if name == "F1" else name
        if key in case:
            same_numbers(value, case[key], name)
            checked.add(name)
    for name in ("R", "ngR", "zR", "ngzR"):
        assert name in checked
        same_numbers(metrics.per_image[name], case[f"{name}_per_image"], name)
    for name in ("mR", "ngmR"):
        assert name in checked
        same_numbers(metrics.per_predicate[name], case[f"{name}_per_predicate"])
        all_images, *images_per_predicate = case[f"{name}_num_images"]
        assert_array_equal(metrics.images_per_predicate, images_per_predicate)
        assert len(metrics.evaluated_images) == all_images
    assert ("A" in case) == ("A" in checked)
    if "A" in case:
        assert_array_equal(metrics.accuracy_hits, case["A_hit"])
        assert_array_equal(metrics.accuracy_counts, case["A_count"])
    assert_array_equal(metrics.evaluated_images, case["evaluated_images"])
    assert_array_equal(metrics.zero_shot_images, case["zeroshot_images"])
    matches = sorted_rows(case["pred_to_gt"])
    assert_array_equal(metrics.matches, matches)
    unconstrained = sorted_rows(case["nogc_pred_to_gt"])
    assert_array_equal(metrics.unconstrained_matches, unconstrained)
    same_numbers(metrics.values["R"][-1], case["return_value"])


def sorted_rows(rows: np.ndarray) -> np.ndarray:
    return rows[np.lexsort(rows.T[::-1])]


def test_phrase_detection(golden, union_box_group):
    case, _, options = evaluator_case(golden, union_box_group)
    metrics = evaluate_scene_graphs(*scene_graphs(case), mode="phrdet", **options)
    same_numbers(metrics.values["R"], case["phrdet_R"])
    same_numbers(metrics.per_image["R"], case["phrdet_R_per_image"])


def columns_of(graphs: list[dict]) -> Boxes:
    boxes = np.concatenate([graph["boxes"] for graph in graphs])
    scores = np.concatenate([graph["scores"] for graph in graphs])
    labels = np.concatenate([graph["labels"] for graph in graphs])
    return Boxes.found(
        [len(graph["boxes"]) for graph in graphs],
        boxes + [0, 0, 1, 1],  # they end at their last pixel
        scores,
        labels,
    )


def test_box_ap_counts_the_first_box(golden, box_group):
    """The original numbers annotations from 0 and COCOeval takes id 0 for "no match": ours is its result from 1 on."""
    case, mode, _ = evaluator_case(golden, box_group)
    truths, predictions = scene_graphs(case)
    for truth, found in zip(truths, predictions, strict=True):
        truth["scores"] = np.ones(len(truth["boxes"]))
        if mode == "predcls":  # the labels are given
            found["labels"] = truth["labels"]
            found["scores"] = truth["scores"]
    num_classes = int(arrays(golden, "evaluator")["num_obj_classes_with_bg"]) - 1
    matches = match_boxes(
        columns_of(truths),
        columns_of(predictions),
        range(len(truths)),
        [str(i) for i in range(num_classes)],
        case["image_size_wh"][:, ::-1],
    )
    numbers = exact_numbers(matches).numbers
    values = [numbers[name][0] for name in COCO_METRICS]
    ours = np.nan_to_num(values, nan=-1)
    same_numbers(ours, case["coco_stats_ids_from_1"])


def test_geometry(golden):
    data = read_tensors(golden, "geometry")
    counts = data["num_boxes"].tolist()
    sizes_hw = per_object(data["image_size_wh"].flip(1), counts)
    boxes = data["boxes"]
    close(box_numbers(boxes, sizes_hw), data["encode_box_info"])
    scaled = scaled_box_numbers(boxes, sizes_hw)
    close(scaled, data["box_info_normalised"])
    subjects, objects = data["pair_info_pairs_img0"].long().unbind(1)
    numbers = pair_numbers(scaled[subjects], scaled[objects])
    close(numbers, data["pair_info_img0"])
    unions = union_boxes(boxes[subjects], boxes[objects])
    close(unions, data["union_boxes_img0"])
    first = boxes[: counts[0]]
    close(iou_plus_one(first[:, None], first[None]), data["iou_img0"])
    of_classes = read_tensors(golden, "postprocess", "nms_overlaps.")
    per_class = of_classes["boxes_per_cls"]
    iou = iou_plus_one(per_class[:, None], per_class[None])
    close(iou, of_classes["iou"])
    mask = object_mask(counts, boxes.device)
    overlaps = overlap_numbers(pad_rows(boxes, counts), mask)
    close(overlaps[mask], data["overlap_info"])
    order, inverse, sizes = reading_order(boxes, counts)
    assert torch.equal(order, data["sort_perm"])
    assert torch.equal(inverse, data["sort_inv_perm"])
    assert torch.equal(sizes, data["sort_batch_sizes"])
    num_classes = data["onehot_out"].shape[1]
    logits = certain_logits(data["onehot_in"], num_classes)
    assert torch.equal(logits, data["onehot_out"])
    size = int(data["rect_size"])
    of_subjects = rectangle_masks(boxes[subjects], sizes_hw[subjects], size)
    of_objects = rectangle_masks(boxes[objects], sizes_hw[objects], size)
    masks = torch.stack([of_subjects, of_objects], 1)
    assert torch.equal(masks.byte(), data["rect_masks_img0"])


def test_frequency_bias(golden):
    data = arrays(golden, "freq_bias")
    images = []
    for i in range(len(data["image_ids"])):
        boxes = rows_of(data["boxes_1024_xyxy"], data["box_ptr"], i)
        image = {
            "boxes": boxes,
            "labels": rows_of(data["classes"], data["box_ptr"], i),
            "relations": rows_of(data["rels"], data["rel_ptr"], i),
        }
        images.append(image)
        expected = rows_of(data["bg_pairs"], data["bg_pair_ptr"], i)
        assert_array_equal(frequency.candidate_pairs(boxes), expected)
    num_classes, _, num_predicates = data["fg_count"].shape
    relations, candidates = frequency.count_predicates(images, num_classes, num_predicates)
    assert_array_equal(relations, data["fg_count"])
    assert_array_equal(candidates, data["bg_count_must_overlap"])
    log_frequency = frequency.log_frequencies(relations, candidates)
    close(log_frequency, data["pred_dist"])
    bias = frequency.FrequencyBias(log_frequency)
    close(bias.table.weight, data["embedding_weight"])
    labels = torch.from_numpy(data["pair_labels"])
    close(bias(*labels.unbind(1)), data["bias_for_labels"])
    probability = torch.from_numpy(data["pair_prob"])
    expected_bias = bias.expected(*probability.unbind(-1))
    close(expected_bias, data["bias_for_prob"])
    filters = group(data, "box_filter")
    for name in without_ending(filters, ".pairs"):
        pairs = frequency.candidate_pairs(filters[f"{name}.boxes"])
        assert_array_equal(pairs, filters[f"{name}.pairs"], err_msg=name)


def smoothing_in(key: str) -> float:
    if not key.startswith("label_smoothing"):
        return 0.0
    value = key.split("_")[2]
    return float(value.rsplit(".", 1)[0])


def test_losses(golden):
    data = arrays(golden, "loss")
    given = tensors(data)
    for key, value in data.items():
        if not key.endswith(("loss_rel", "loss_refine_obj")):
            continue
        kind = "rel" if key.endswith("loss_rel") else "obj"
        logits = given[f"{kind}_logits"]
        labels = given[f"{kind}_labels"]
        total, count = predicate_loss(logits, labels, [len(labels)], smoothing_in(key))
        loss = mean_or_zero(total, count)[0]
        close(loss, value, name=key)
    logits = given["rel_logits"]
    labels = given["rel_labels"]
    every = [1] * len(labels)
    for key, value in data.items():
        if key.endswith("_none"):
            smoothing = float(key.split("_")[2])
            rows, _ = predicate_loss(logits, labels, every, smoothing)
            close(rows, value, name=key)
    attributes = given["attributes"]
    logits = given["att_logits"]
    targets, has_any = attribute_targets(attributes, logits.shape[1])
    assert torch.equal(targets, given["attribute_targets"])
    assert torch.equal(has_any.long(), given["attribute_fg"])
    total, count = attribute_loss(logits, attributes, [len(attributes)])
    loss = mean_or_zero(total, count)[0]
    close(loss, data["with_attributes_no_sampling.loss_refine_att"])


def sgd(base_lrs: list[float]) -> torch.optim.SGD:
    groups = []
    for lr in base_lrs:
        parameter = torch.nn.Parameter(torch.zeros(1))
        groups.append({"params": [parameter], "lr": lr})
    return torch.optim.SGD(groups, lr=0.0)


CODE_DEFAULTS = {
    "gamma": 0.5,
    "warmup_factor": 1 / 3,
    "warmup_iters": 500,
    "warmup_method": "linear",
}
PLATEAU_DEFAULTS = {"patience": 2, "threshold": 1e-4, "cooldown": 1}
OUR_OPTIONS = {"warmup_factor": "warmup_start", "warmup_iters": "warmup_steps"}


def plateau_schedule(case: dict) -> PlateauSchedule:
    theirs = CODE_DEFAULTS | PLATEAU_DEFAULTS | case["params"]
    options = {}
    for key, value in theirs.items():
        options[OUR_OPTIONS.get(key, key)] = value
    max_decays = case["max_decay_step"] or 10**6
    optimizer = sgd(case["base_lrs"])
    return PlateauSchedule(optimizer, **options, max_decays=max_decays)


def test_schedule(golden, schedule_case):
    case = document(golden, "schedule")["cases"][schedule_case]
    if case["kind"] == "WarmupMultiStepLR":
        check_multistep(case)
    elif case["params"].get("patience", 2) < 1:
        with pytest.raises(BadInput, match="patience"):
            plateau_schedule(case)
    else:
        check_plateau(case)


def check_multistep(case: dict) -> None:
    params = CODE_DEFAULTS | {"gamma": 0.1} | case["params"]
    base_lrs = np.array(case["base_lrs"])
    for step, expected in enumerate(case["lr_used"]):
        factor = lr_factor(
            step,
            "multistep",
            milestones=params["milestones"],
            gamma=params["gamma"],
            warmup_steps=params["warmup_iters"],
            warmup_factor=params["warmup_factor"],
            warmup_method=params["warmup_method"],
        )
        assert_allclose(base_lrs * factor, expected, rtol=1e-9)


def second_over_first(case: dict) -> float:
    """The warm-up's factor of the second update, as a multiple of the first one's."""
    params = CODE_DEFAULTS | case["params"]
    warmup = [params[f"warmup_{name}"] for name in ("iters", "factor", "method")]
    return warm_up(1, *warmup) / warm_up(0, *warmup)


def check_plateau(case: dict) -> None:
    """With the constructor's phantom validation of 0 put back, everything equals the original but the first rate."""
    schedule = plateau_schedule(case)
    assert schedule.best is None, "not consumed"
    cooldown = (PLATEAU_DEFAULTS | case["params"])["cooldown"]
    assert schedule.cooling == cooldown, "not consumed"
    schedule.observe(0.0)
    after_init = case["state_after_init"]
    assert schedule.best == after_init["best"]
    assert schedule.cooling == after_init["under_cooldown"]
    assert schedule.decays == after_init["stage_count"]
    for step, expected in enumerate(case["lr_used"]):
        schedule.set(step)
        rates = list(schedule.rates().values())
        if step == 0:  # the original starts counting at 1 and so uses the second rate twice
            assert expected == case["lr_after_init"]
            expected = np.array(expected) / second_over_first(case)
        assert_allclose(rates, expected, rtol=1e-9, err_msg=f"step {step}")
        seen = case["val_seen"][step]
        if seen is not None:
            schedule.observe(float(seen))
        assert schedule.decays == case["stage_count"][step]
        assert schedule.bad == case["num_bad_epochs"][step]
        assert schedule.cooling == case["under_cooldown"][step]
        assert_allclose(schedule.best, case["best"][step], rtol=1e-9)
        stops = case["stopped_at_iteration"] == step + 1
        assert schedule.finished == stops


def test_resume_keeps_the_schedule(golden):
    """Of four ways to resume, the original forgets the decays in three; we never do."""
    for case in document(golden, "clip_grad")["resume"].values():
        before = case["before_save"]
        schedule = PlateauSchedule(sgd([0.1]), gamma=0.1, warmup_steps=0)
        while schedule.decays < before["stage_count"]:
            schedule.observe(before["best"])
        saved = json.dumps(schedule.state_dict())
        again = PlateauSchedule(sgd([0.1]))
        again.load_state_dict(json.loads(saved))
        again.set(before["last_epoch"] + 1)
        assert again.decays == before["stage_count"]
        assert again.best == before["best"]
        assert_allclose(again.rates()["0"], before["lr"], rtol=1e-9)


class Tree(torch.nn.Module):
    """A module whose parameters have the given names."""

    def __init__(self, names: list[str]):
        super().__init__()
        for name in names:
            *path, leaf = name.split(".")
            node = self
            for part in path:
                if not hasattr(node, part):
                    node.add_module(part, torch.nn.Module())
                node = getattr(node, part)
            shape = (3,) if leaf == "bias" else (3, 2)
            parameter = torch.nn.Parameter(torch.zeros(shape))
            node.register_parameter(leaf, parameter)


def test_optimizer_groups(golden):
    """The same but for weights with "bias" somewhere in their name: to us only a bias is a bias."""
    for cases in document(golden, "schedule")["optimizer_groups"].values():
        for case in cases:
            check_optimizer_groups(case)


def check_optimizer_groups(case: dict) -> None:
    names = [entry["name"] for entry in case["groups"]]
    frozen = tuple(case["frozen_names"])
    assert not any(name.startswith(frozen) for name in names)
    groups = parameter_groups(
        Tree(names),
        lr=case["base_lr"] * case["images_per_batch_factor"],
        bias_lr_factor=case["bias_lr_factor"],
        weight_decay=case["weight_decay"],
        bias_weight_decay=case["weight_decay_bias"],
        slow_prefixes=case["slow_heads"],
        slow_factor=1 / case["slow_ratio"],
    )
    ours = {}
    for options in groups:
        for name in options["param_names"]:
            ours[name] = (options["lr"], options["weight_decay"])
    for entry in case["groups"]:
        name = entry["name"]
        lr = entry["lr"]
        weight_decay = entry["weight_decay"]
        if "bias" in name and not name.endswith(".bias"):
            lr = lr / case["bias_lr_factor"]
            weight_decay = case["weight_decay"]
        assert_allclose(ours[name], (lr, weight_decay), rtol=1e-9, err_msg=name)


def test_clipping(golden, clip_case):
    case = group(arrays(golden, "clip_grad"), clip_case)
    text = document(golden, "clip_grad")[clip_case]
    named = []
    for i, name in enumerate(text["names"]):
        gradient = torch.from_numpy(case[f"grad_in_{i}"])
        parameter = torch.nn.Parameter(torch.zeros(gradient.shape))
        parameter.grad = gradient.clone()
        named.append((name, parameter))
    for name in text["without_grad"]:
        parameter = torch.nn.Parameter(torch.zeros(2))
        named.append((name, parameter))
    max_norm = float(case["max_norm"])
    if text["log_lines"]:
        table = gradient_table(named, max_norm)
        same_lines(table.splitlines(), text["log_lines"])
    parameters = [parameter for _, parameter in named]
    norm = gradient_norm(parameters)  # norm and clipping as the training scripts have them
    if case["clip"]:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    if not np.isfinite(case["total_norm"]):  # left to the guard, which stops before the update
        assert not norm.isfinite()
        return
    assert_allclose(float(norm), case["total_norm"], rtol=1e-5)
    for i, name in enumerate(text["names"]):
        expected = case[f"grad_out_{i}"]
        assert_allclose(parameters[i].grad, expected, rtol=1e-5, atol=1e-12, err_msg=name)


NUMBER = re.compile(r"\d+\.\d{5}")


def numbers_in(line: str) -> list[float]:
    return [float(number) for number in NUMBER.findall(line)]


def same_lines(ours: list[str], expected: list[str]) -> None:
    """The same text, numbers equal up to the last printed digit."""
    for line, other in zip(ours, expected, strict=True):
        assert NUMBER.sub("#", line) == NUMBER.sub("#", other)
        assert_allclose(numbers_in(line), numbers_in(other), rtol=1e-5, atol=1.1e-5)


def test_weight_mapping(golden):
    case = document(golden, "clip_grad")["load_mapping"]
    checkpoint = {}
    for i, name in enumerate(case["loaded_keys"]):
        checkpoint[name] = torch.tensor(float(i))
    model = {name: torch.tensor(-1.0) for name in case["model_keys"]}
    mapped = map_weights(model, checkpoint, case["mapping"])
    sources = case["model_key_takes_value_of"]
    expected = {name: source for name, source in sources.items() if source is not None}
    assert mapped.sources == expected
    assert set(mapped.new) == set(model) - set(expected)
    for name, source in expected.items():
        assert mapped.state[name] == checkpoint[source]


def sample(
    case: Tensors,
    params: np.ndarray,
    generator: Generator,
) -> pair_sampling.SampledPairs:
    fg_iou, require_overlap, per_relation, batch_size, fraction, given_boxes, _ = params.tolist()
    relation = case["target_relation"]
    if given_boxes:
        return pair_sampling.sample_given_boxes(
            relation,
            int(batch_size),
            fraction,
            generator,
        )
    return pair_sampling.sample_detected_boxes(
        case["proposal_boxes"],
        case["proposal_labels"],
        case["target_boxes"],
        case["target_labels"],
        relation,
        fg_iou=fg_iou,
        require_overlap=bool(require_overlap),
        per_relation=int(per_relation),
        batch_size=int(batch_size),
        positive_fraction=fraction,
        generator=generator,
    )


def with_labels(drawn: pair_sampling.SampledPairs) -> Tensor:
    return torch.cat([drawn.pairs, drawn.labels[:, None]], 1)


def as_set(rows) -> set[tuple[int, ...]]:
    return set(map(tuple, rows.tolist()))


def test_sampling(golden, sampling_image):
    """Counts and candidate sets; the file lists what 20 draws of the original happened to bring up."""
    data = arrays(golden, "sampling")
    case = tensors(group(data, sampling_image))
    name = sampling_image.split(".")[0]
    params = data[f"{name}.params"]
    is_fixed = {"fg": bool(case["fg_fixed"]), "bg": bool(case["bg_set_fixed"])}
    draws = 3 if all(is_fixed.values()) else 200
    seen = {"fg": set(), "bg": set()}
    for seed in range(draws):
        generator = Generator().manual_seed(seed)
        drawn = sample(case, params, generator)
        rows = with_labels(drawn)
        foreground = rows[rows[:, 2] > 0]
        background = rows[rows[:, 2] == 0]
        assert torch.equal(rows, torch.cat([foreground, background])), "foreground comes first"
        assert torch.equal(drawn.related.long(), case["binary_rel"])
        subjects, objects, _ = foreground.unbind(1)
        assert drawn.related[subjects, objects].all()
        assert len(foreground) == case["num_fg"]
        assert len(background) == case["num_bg"]
        seen["fg"] |= as_set(foreground)
        seen["bg"] |= as_set(background)
    for kind, rows in seen.items():
        listed = as_set(case[f"{kind}_union_over_draws"])
        assert rows >= listed
        if is_fixed[kind]:
            assert rows == listed


def test_sampling_of_given_boxes_draws_the_same_rows(golden):
    """The given-box rows use torch's generator only, so even the draws are those of the original."""
    data = arrays(golden, "sampling")
    for name in ending(golden, "sampling", ".params"):
        params = data[f"{name}.params"]
        given_boxes = params[5]
        if not given_boxes:
            continue
        every = prefixes(golden, "sampling", 2)
        images = [image for image in every if image.startswith(f"{name}.img")]
        for seed in (0, 1):
            generator = Generator().manual_seed(seed)
            for image in images:
                case = tensors(group(data, image))
                drawn = sample(case, params, generator)
                expected = data[f"{image}.out_seed{seed}"]
                assert_array_equal(with_labels(drawn), expected, err_msg=image)


def test_pairs_to_ask(golden):
    data = group(arrays(golden, "sampling"), "test_pairs")
    names = without_ending(data, ".pairs")
    assert names
    for name in names:
        given = "use_gt_box_True" in name
        overlap = "require_overlap_True" in name
        image = name.split(".")[2]
        boxes = torch.from_numpy(data[f"{image}.boxes"])
        pairs = pair_sampling.pairs_to_ask(boxes, overlap and not given)
        assert_array_equal(pairs, data[f"{name}.pairs"], err_msg=name)


def test_postprocess(golden, postprocess_case):
    case = group(arrays(golden, "postprocess"), postprocess_case)
    names = {key.split(".")[0] for key in case if key.startswith("img")}
    images = [tensors(group(case, f"img{i}")) for i in range(len(names))]
    batch = concatenated(images, "rel_pair_idxs_in")
    object_logits = torch.cat([image["obj_logits"] for image in images])
    relation_logits = torch.cat([image["rel_logits"] for image in images])
    columns = postprocess.rank_triplets(
        RelationOutput(object_logits, relation_logits, None),
        batch,
        given_boxes=bool(case["use_gt_box"]),
        nms_threshold=float(case["later_nms_pred_thres"]),
    )
    graphs = postprocess.graphs_on_host(*columns, batch.num_objects, batch.num_pairs)
    for graph, expected in zip(graphs, images, strict=True):
        close(graph["boxes"], expected["out_boxes"])
        assert torch.equal(graph["labels"] + 1, expected["pred_labels"])
        close(graph["scores"], expected["pred_scores"])
        close(graph["triplet_scores"], expected["triple_scores"])
        ranked = expected["triple_scores"] > 0  # the order of triplets that score 0 is not defined
        pairs = expected["rel_pair_idxs"][ranked]
        assert torch.equal(graph["pairs"][ranked], pairs)
        predicates = expected["pred_rel_labels"][ranked]
        assert torch.equal(graph["predicates"][ranked] + 1, predicates)
        scores = expected["pred_rel_scores"][ranked, 1:]
        close(graph["predicate_scores"][ranked], scores)


def concatenated(images: list[Tensors], pairs_key: str) -> RelationBatch:
    counts = [len(image["boxes"]) for image in images]
    starts = np.cumsum([0, *counts])
    pairs = [image[pairs_key] for image in images]
    shifted = [of_image + start for of_image, start in zip(pairs, starts, strict=False)]
    return RelationBatch(
        boxes_xyxy=torch.cat([image["boxes"] for image in images]),
        sizes_hw=torch.zeros(len(images), 2),
        num_objects=counts,
        pairs=torch.cat(shifted),
        num_pairs=list(map(len, pairs)),
        roi_features=torch.zeros(0),
        boxes_per_class=torch.cat([image["boxes_per_cls"] for image in images]),
    )


def numbered_from_one(names: list[str]) -> dict[str, int]:
    return {name: number for number, name in enumerate(names, start=1)}


@pytest.fixture(scope="session")
def vg_folder(golden, tmp_path_factory) -> Path:
    """The files of the data set, written from their arrays."""
    folder = tmp_path_factory.mktemp("vg")
    data = arrays(golden, "dataset")
    with h5py.File(folder / "VG-SGG-with-attri.h5", "w") as file:
        for key, value in group(data, "h5").items():
            file[key] = value
    columns = group(data, "image_data")
    values = [column.tolist() for column in columns.values()]
    entries = []
    for row in zip(*values, strict=True):
        entry = dict(zip(columns, row, strict=True))
        entries.append(entry)
    (folder / "image_data.json").write_text(json.dumps(entries))
    num_attributes = int(data["h5.attributes"].max(initial=0))
    attributes = [f"attribute {i + 1}" for i in range(num_attributes)]
    info = {
        "label_to_idx": numbered_from_one(data["ind_to_classes"].tolist()[1:]),
        "predicate_to_idx": numbered_from_one(data["ind_to_predicates"].tolist()[1:]),
        "attribute_to_idx": numbered_from_one(attributes),
    }
    (folder / "VG-SGG-dicts-with-attri.json").write_text(json.dumps(info))
    images = folder / "images"
    images.mkdir()
    for entry in entries:
        image_id = entry["image_id"]
        if image_id not in data["image_ids_without_file"]:
            (images / f"{image_id}.jpg").touch()
    return folder


def split_options(name: str, data: Arrays) -> tuple[str, dict]:
    split, empty, overlap = name.split(".")
    options = {
        "num_val_images": int(data["num_val_im"]),
        "drop_non_overlapping": split == "train" and overlap == "nonoverlap_dropped",
        "keep_images_without_relations": empty == "emptyrels_kept",
    }
    return split, options


def pointers(lists: list) -> np.ndarray:
    """Return where each list starts when all are joined, and where the last one ends."""
    return np.cumsum([0, *map(len, lists)])


def test_dataset(golden, vg_folder, dataset_split):
    data = arrays(golden, "dataset")
    case = group(data, dataset_split)
    split, options = split_options(dataset_split, data)
    graphs = vg.load_graphs(vg_folder / "VG-SGG-with-attri.h5", split, **options)
    listed = vg.load_image_list(
        vg_folder / "image_data.json",
        vg_folder / "images",
        len(data["h5.split"]),
    )
    images = [listed[i] for i in graphs.index]
    assert_array_equal(graphs.index, np.flatnonzero(case["split_mask"]))
    assert [image["image_id"] for image in images] == case["image_ids"].tolist()
    relations = np.concatenate(graphs.relations)
    assert_array_equal(np.concatenate(graphs.boxes), case["boxes_1024_xyxy"])
    assert_array_equal(np.concatenate(graphs.labels), case["classes"])
    assert_array_equal(relations, case["rels"])
    assert_array_equal(pointers(graphs.boxes), case["box_ptr"])
    assert_array_equal(pointers(graphs.relations), case["rel_ptr"])
    sizes = [(image["width"], image["height"]) for image in images]
    scaled = []
    for boxes, size in zip(graphs.boxes, sizes, strict=True):
        scaled.append(vg.scale_boxes(boxes, size))
    clipped = clipped_to(sizes, scaled)
    if "eval_boxes_xyxy" in case:
        close(np.concatenate(clipped), case["eval_boxes_xyxy"], 1e-4)
        assert_array_equal(relations, case["eval_relation_tuple"])
    elif "train_boxes_xyxy" in case:
        check_training_boxes(graphs, clipped, case)
        check_flipped_boxes(scaled, sizes, case)


def clipped_to(sizes: list[tuple[int, int]], boxes_of_images: list) -> list:
    clipped = []
    for boxes, size in zip(boxes_of_images, sizes, strict=True):
        clipped.append(vg.clip_to_last_pixel(boxes, size))
    return clipped


def check_training_boxes(graphs, clipped: list, case: Arrays) -> None:
    kept_boxes = []
    kept_labels = []
    for i, boxes in enumerate(clipped):
        kept, _ = vg.drop_empty(boxes, graphs.relations[i])
        kept_boxes.append(boxes[kept])
        kept_labels.append(graphs.labels[i][kept])
    close(np.concatenate(kept_boxes), case["train_boxes_xyxy"], 1e-4)
    assert_array_equal(pointers(kept_boxes), case["train_box_ptr"])
    assert_array_equal(np.concatenate(kept_labels), case["train_labels"])


def check_flipped_boxes(scaled: list, sizes: list, case: Arrays) -> None:
    flipped = []
    for boxes, (width, _) in zip(scaled, sizes, strict=True):
        turned = boxes[:, [2, 1, 0, 3]] * [-1, 1, -1, 1]
        flipped.append([width, 0, width, 0] + turned)
    kept_boxes = []
    no_relations = np.zeros((0, 3), int)
    for boxes in clipped_to(sizes, flipped):
        kept, _ = vg.drop_empty(boxes, no_relations)
        kept_boxes.append(boxes[kept])
    close(np.concatenate(kept_boxes), case["train_boxes_flipped_xyxy"], 1e-4)
    assert_array_equal(pointers(kept_boxes), case["train_flipped_box_ptr"])


def drawn_relations(rows: Tensor, num_objects: int, one_of_each: bool, draws: int) -> set:
    """Return all relations, (subject, object, predicate), that some draw has in its matrix."""
    pairs_of_rows = as_set(rows[:, :2])
    seen = set()
    for seed in range(draws):
        generator = Generator().manual_seed(seed)
        matrix = pair_sampling.relation_matrix(rows, num_objects, one_of_each, generator)
        pairs = matrix.nonzero()
        assert as_set(pairs) == pairs_of_rows, "every annotated pair has a predicate"
        predicates = matrix[pairs[:, 0], pairs[:, 1], None]
        seen |= as_set(torch.cat([pairs, predicates], 1))
    return seen


def test_relation_matrices(golden, vg_folder, train_split):
    """One predicate per pair and draw: those always drawn are always drawn, the others take turns."""
    data = arrays(golden, "dataset")
    case = group(data, train_split)
    split, options = split_options(train_split, data)
    reading = Reading(
        vg_folder / "images",
        check_images=False,
        cache_dir=vg_folder / "cache",
    )
    table = vg.read_visual_genome(vg_folder, split, reading, **options)
    table_rows = [table.row(i) for i in range(len(table))]
    assert [row["image_id"] for row in table_rows] == case["image_ids"].tolist()
    for i, row in enumerate(table_rows):
        columns = [row["relations"][key] for key in ("subject", "object", "predicate")]
        rows = torch.from_numpy(np.stack(columns, 1))
        rows += torch.tensor([0, 0, 1])
        of_image = case[DRAWN][:, 0] == i
        listed = as_set(case[DRAWN][of_image, 1:4])
        annotated = as_set(rows)
        has_choice = len(annotated) > len(as_set(rows[:, :2]))
        draws = 200 if has_choice else 1
        num_objects = len(row["objects"]["bbox"])
        for one_of_each in (True, False):
            seen = drawn_relations(rows, num_objects, one_of_each, draws)
            assert listed <= seen <= annotated


def test_head_logits(golden, head):
    """Images alone, and together: the original asserts one image per batch where labels are decoded."""
    data = arrays(golden, f"head_{head}")
    modules = {}
    cases = cases_of(data, "eval")
    assert cases
    for case in cases:
        mode, _, *effects, images = case.split(".")
        if mode not in modules:
            modules[mode] = build_head(head, mode, data).eval()
        module = modules[mode]
        effect = effects[0] if effects else "none"
        if effects or "causal" in head:
            module.effect = effect
        image = None if images == "batch" else int(images.removeprefix("img"))
        with torch.no_grad():
            output = module(head_batch(data, mode, image))
        share = 1e-5 if effect == "none" else 5e-4
        expected = group(data, case)
        within(output.relation_logits, expected["rel_dists"], share, case)
        within(output.object_logits, expected["obj_dists"], 1e-5, case)
        if "obj_preds" in expected:
            assert_array_equal(output.object_labels, expected["obj_preds"], err_msg=case)
            within(output.context, expected["edge_ctx"], 1e-5, case)
        if image == 0:
            with torch.no_grad():
                together = module(head_batch(data, mode))
            stem = case.removesuffix("0")
            num_images = len(data["in.num_objs"])
            alone = [data[f"{stem}{i}.rel_dists"] for i in range(num_images)]
            within(together.relation_logits, np.concatenate(alone), share, case)


def test_head_trees(golden, tree_head):
    topic = f"head_{tree_head}"
    data = arrays(golden, topic)
    for case in ending(golden, topic, ".tree_root"):
        expected = group(data, case)
        mode = case.split(".")[0]
        image = int(case.rsplit("img", 1)[1])
        module = build_head(tree_head, mode, data).eval()
        batch = head_batch(data, mode, image)
        context = module.context
        with torch.no_grad():
            embedding = label_embedding(context.embed_in, batch, mode)
            forest, _ = context.plant(batch, embedding)
        assert forest.levels[0].tolist() == [expected["tree_root"]]
        assert_array_equal(forest.parent, expected["tree_parent"], err_msg=case)
        assert_array_equal(forest.left, expected["bitree_left"], err_msg=case)
        assert_array_equal(forest.right, expected["bitree_right"], err_msg=case)


def gradient_norms(module: torch.nn.Module) -> dict[str, float]:
    norms = {}
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            norms[name] = float(parameter.grad.double().norm())
    return norms


def test_head_training(golden, head):
    """Logits, losses and gradients of the first step, then four SGD steps on the same batch."""
    data = arrays(golden, f"head_{head}")
    for case in cases_of(data, "train"):
        check_head_training(head, case, data)


def check_head_training(head: str, case: str, data: Arrays) -> None:
    wanted = group(data, case)
    mode = case.split(".")[0]
    module = build_head(head, mode, data).train()
    lr, momentum = data["train.lr_momentum"].tolist()
    optimizer = torch.optim.SGD(module.parameters(), lr=lr, momentum=momentum)
    batch = head_batch(data, mode, train=True)
    names = wanted["loss_names"].tolist()
    assert set(module.loss_names) == set(names) - {"total_grad_norm"}
    for step, expected in enumerate(wanted["losses_per_step"]):
        output = module(batch)
        values = {}
        for name, (sums, counts) in head_losses(output, batch).items():
            values[name] = mean_or_zero(sums.sum(), counts.sum())
        optimizer.zero_grad()
        sum(values.values()).backward()
        norms = gradient_norms(module)
        if step == 0:
            within(output.relation_logits, wanted["rel_dists"], 1e-5, case)
            within(output.object_logits, wanted["obj_dists"], 1e-5, case)
            check_first_gradients(head, case, wanted, norms)
        ours = {name: float(value.detach()) for name, value in values.items()}
        squares = [norm**2 for norm in norms.values()]
        ours["total_grad_norm"] = sum(squares) ** 0.5
        # at most 6e-7 more than the 1e-6 in any step, on kernels for SSE and for AVX2
        assert_allclose(
            [ours[name] for name in names],
            expected,
            rtol=5e-6,
            atol=1e-6,
            err_msg=f"{case} step {step}",
        )
        optimizer.step()
    buffers = dict(module.named_buffers())
    totals = zip(wanted["buffer_names"].tolist(), wanted["final_buffers_sum"], strict=True)
    for original, total in totals:
        name = our_name(head, original)
        if name is not None:
            value = buffers[name].double().sum()
            close(float(value), total, 1e-4, f"{case} {original}")


def check_first_gradients(head: str, case: str, wanted: Arrays, norms: dict[str, float]) -> None:
    names = wanted["grad_norm_names"].tolist()
    expected = wanted["grad_norms"]
    largest = float(expected.max())
    for name, norm in zip(names, expected, strict=True):
        ours = our_name(head, name)
        assert ours is not None, f"{case} {name}"
        difference = abs(norms[ours] - norm)
        assert difference <= 1e-4 * norm + 1e-6 * largest, f"{case} {name}"
    for name in wanted["params_without_grad"].tolist():
        norm = norms.get(our_name(head, name))
        assert not norm, f"{case}: the original has no gradient of {name}"
