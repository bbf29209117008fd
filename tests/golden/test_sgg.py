"""Scene graphs against the numbers of Scene-Graph-Benchmark; every group and case is enumerated from the files."""

import json
import re
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from golden_files import (
    arrays,
    cases_of,
    close,
    document,
    ending,
    group,
    parametrize,
    per_object,
    prefixes,
    rows_of,
    tensors,
    within,
)
from sgg_heads import build_head, head_batch

from toolkit.base.batch import pad_rows
from toolkit.base.boxes import Boxes
from toolkit.base.errors import BadInput
from toolkit.data.annotations import Reading
from toolkit.detectors.scene_graphs import box_features, frequency, pair_sampling, postprocess, relation_batch
from toolkit.detectors.scene_graphs.heads.layers import label_embedding
from toolkit.detectors.scene_graphs.metrics import evaluate_scene_graphs
from toolkit.detectors.scene_graphs.readers import visual_genome as vg
from toolkit.detectors.scene_graphs.relation_batch import RelationBatch, RelationOutput, attribute_targets, object_mask
from toolkit.detectors.scene_graphs.weights_scene_graph_benchmark import our_name
from toolkit.evaluation.coco_numbers import exact_numbers
from toolkit.evaluation.matches import match_boxes
from toolkit.evaluation.shown_metrics import COCO_METRICS
from toolkit.models.weights.mapping import map_weights
from toolkit.step.optim import gradient_norm, gradient_table, parameter_groups
from toolkit.step.schedules import PlateauSchedule, lr_factor, warm_up


def pytest_generate_tests(metafunc):
    folder = metafunc.config.getoption("golden")
    heads = sorted(path.stem.removeprefix("sgg_head_") for path in folder.glob("sgg_head_*.npz"))
    parametrize(metafunc, {
        "schedule_case": lambda: list(document(folder, "schedule")["cases"]),
        "clip_case": lambda: prefixes(folder, "clip_grad"),
        "head": lambda: heads,
        "tree_head": lambda: [h for h in heads if any("tree_root" in k for k in arrays(folder, f"head_{h}"))],
        "dataset_split": lambda: ending(folder, "dataset", ".split_mask"),
        "train_split": lambda: ending(folder, "dataset", ".train_relation_map_values_over_40_draws"),
        "evaluator_group": lambda: prefixes(folder, "evaluator"),
        "union_box_group": lambda: ending(folder, "evaluator", ".phrdet_R"),
        "box_group": lambda: ending(folder, "evaluator", ".coco_stats"),
        "sampling_image": lambda: [n for n in prefixes(folder, "sampling", 2) if not n.startswith("test_pairs")
                                   and not n.endswith("params")],
        "postprocess_case": lambda: list(dict.fromkeys(
            key.split(".img")[0] for key in arrays(folder, "postprocess") if ".img" in key)),
    })  # fmt: skip


def scene_graphs(case: dict[str, np.ndarray]) -> tuple[list[dict], list[dict]]:
    truths, predictions = [], []
    for i in range(len(case["image_size_wh"])):
        relations = rows_of(case["gt_rels"], case["gt_rel_ptr"], i) - [0, 0, 1]
        boxes, labels = (rows_of(case[key], case["gt_ptr"], i) for key in ("gt_boxes", "gt_classes"))
        truths.append({"boxes": boxes, "labels": labels - 1, "relations": relations})
        pred = {key: rows_of(case[f"pred_{key}"], case["pred_ptr"], i) for key in ("boxes", "labels", "scores")}
        pred["labels"] = pred["labels"] - 1
        pred["pairs"] = rows_of(case["rel_pair_idxs"], case["rel_ptr"], i)
        pred["predicate_scores"] = rows_of(case["rel_scores"], case["rel_ptr"], i)[:, 1:]
        predictions.append(pred)
    return truths, predictions


def evaluator_case(golden: Path, name: str) -> tuple[dict[str, np.ndarray], str, dict]:
    data = arrays(golden, "evaluator")
    case = group(data, name)
    options = {"num_predicates": int(data["num_rel_classes_with_bg"]) - 1, "top": tuple(data["K"].tolist())}
    options |= {"iou_threshold": float(data["iou_threshold"]), "zero_shot": case["zeroshot_triplets_sub_obj_pred"] - 1}
    return case, str(case.get("mode", name)), options


def test_evaluator(golden, evaluator_group):
    case, mode, options = evaluator_case(golden, evaluator_group)
    metrics = evaluate_scene_graphs(*scene_graphs(case), mode=mode, **options)
    checked = set()
    for name, value in metrics.values.items():
        if (key := "fork_F1" if name == "F1" else name) in case:
            np.testing.assert_allclose(value, case[key], rtol=0, atol=1e-9, equal_nan=True, err_msg=name)
            checked.add(name)
    for name in ("R", "ngR", "zR", "ngzR"):
        np.testing.assert_allclose(metrics.per_image[name], case[f"{name}_per_image"], rtol=0, atol=1e-9, err_msg=name)
    for name in ("mR", "ngmR"):
        np.testing.assert_allclose(metrics.per_predicate[name], case[f"{name}_per_predicate"], rtol=0, atol=1e-9)
        np.testing.assert_array_equal(metrics.images_per_predicate, case[f"{name}_num_images"][1:])
        assert len(metrics.evaluated_images) == case[f"{name}_num_images"][0]
    assert {"R", "ngR", "zR", "ngzR", "mR", "ngmR"} <= checked
    assert ("A" in case) == ("A" in checked)
    if "A" in case:
        np.testing.assert_array_equal(metrics.accuracy_hits, case["A_hit"])
        np.testing.assert_array_equal(metrics.accuracy_counts, case["A_count"])
    np.testing.assert_array_equal(metrics.evaluated_images, case["evaluated_images"])
    np.testing.assert_array_equal(metrics.zero_shot_images, case["zeroshot_images"])
    np.testing.assert_array_equal(metrics.matches, sorted_rows(case["pred_to_gt"]))
    np.testing.assert_array_equal(metrics.unconstrained_matches, sorted_rows(case["nogc_pred_to_gt"]))
    np.testing.assert_allclose(metrics.values["R"][-1], case["return_value"], rtol=0, atol=1e-9)


def sorted_rows(rows: np.ndarray) -> np.ndarray:
    return rows[np.lexsort(rows.T[::-1])]


def test_phrase_detection(golden, union_box_group):
    case, _, options = evaluator_case(golden, union_box_group)
    metrics = evaluate_scene_graphs(*scene_graphs(case), mode="phrdet", **options)
    np.testing.assert_allclose(metrics.values["R"], case["phrdet_R"], rtol=0, atol=1e-9)
    np.testing.assert_allclose(metrics.per_image["R"], case["phrdet_R_per_image"], rtol=0, atol=1e-9)


def test_box_ap_counts_the_first_box(golden, box_group):
    """The original numbers annotations from 0 and COCOeval takes id 0 for "no match": ours is its result from 1 on."""
    case, mode, _ = evaluator_case(golden, box_group)
    truths, predictions = scene_graphs(case)
    if mode == "predcls":  # the labels are given
        given = ({"labels": truth["labels"], "scores": np.ones(len(truth["labels"]))} for truth in truths)
        predictions = [found | labels for found, labels in zip(predictions, given, strict=True)]
    truth, found = (
        Boxes.found(
            [len(graph["boxes"]) for graph in graphs],
            np.concatenate([graph["boxes"] for graph in graphs]) + [0, 0, 1, 1],  # they end at their last pixel
            np.concatenate([graph.get("scores", np.ones(len(graph["boxes"]))) for graph in graphs]),
            np.concatenate([graph["labels"] for graph in graphs]),
        )
        for graphs in (truths, predictions)
    )
    names = [str(i) for i in range(int(arrays(golden, "evaluator")["num_obj_classes_with_bg"]) - 1)]
    matches = match_boxes(truth, found, range(len(truths)), names, case["image_size_wh"][:, ::-1])
    numbers = exact_numbers(matches).numbers
    ours = np.nan_to_num([numbers[name][0] for name in COCO_METRICS], nan=-1)
    np.testing.assert_allclose(ours, case["coco_stats_ids_from_1"], rtol=0, atol=1e-9)


def test_geometry(golden):
    data = tensors(arrays(golden, "geometry"))
    counts = data["num_boxes"].tolist()
    sizes_hw = per_object(data["image_size_wh"].flip(1), counts)
    boxes = data["boxes"]
    close(box_features.box_numbers(boxes, sizes_hw), data["encode_box_info"])
    scaled = box_features.scaled_box_numbers(boxes, sizes_hw)
    close(scaled, data["box_info_normalised"])
    pairs = data["pair_info_pairs_img0"].long()
    close(box_features.pair_numbers(scaled[pairs[:, 0]], scaled[pairs[:, 1]]), data["pair_info_img0"])
    close(box_features.union_boxes(boxes[pairs[:, 0]], boxes[pairs[:, 1]]), data["union_boxes_img0"])
    first = boxes[: counts[0]]
    close(box_features.iou_plus_one(first[:, None], first[None]), data["iou_img0"])
    of_classes = tensors(group(arrays(golden, "postprocess"), "nms_overlaps"))
    boxes_per_class = of_classes["boxes_per_cls"]
    close(box_features.iou_plus_one(boxes_per_class[:, None], boxes_per_class[None]), of_classes["iou"])
    mask = object_mask(counts, boxes.device)
    close(box_features.overlap_numbers(pad_rows(boxes, counts), mask)[mask], data["overlap_info"])
    order, inverse, sizes = box_features.reading_order(boxes, counts)
    for ours, key in ((order, "sort_perm"), (inverse, "sort_inv_perm"), (sizes, "sort_batch_sizes")):
        assert torch.equal(ours, data[key])
    num_classes = data["onehot_out"].shape[1]
    assert torch.equal(box_features.certain_logits(data["onehot_in"], num_classes), data["onehot_out"])
    ends, size = [pairs[:, 0], pairs[:, 1]], int(data["rect_size"])
    masks = [box_features.rectangle_masks(boxes[end], sizes_hw[end], size) for end in ends]
    assert torch.equal(torch.stack(masks, 1).byte(), data["rect_masks_img0"])


def test_frequency_bias(golden):
    data = arrays(golden, "freq_bias")
    keys = {"boxes": "boxes_1024_xyxy", "labels": "classes", "relations": "rels"}
    ptrs = {"boxes": "box_ptr", "labels": "box_ptr", "relations": "rel_ptr"}
    images = [{name: rows_of(data[key], data[ptrs[name]], i) for name, key in keys.items()}
              for i in range(len(data["image_ids"]))]  # fmt: skip
    for i, image in enumerate(images):
        pairs = frequency.candidate_pairs(image["boxes"])
        np.testing.assert_array_equal(pairs, rows_of(data["bg_pairs"], data["bg_pair_ptr"], i))
    num_classes, _, num_predicates = data["fg_count"].shape
    relations, candidates = frequency.count_predicates(images, num_classes, num_predicates)
    np.testing.assert_array_equal(relations, data["fg_count"])
    np.testing.assert_array_equal(candidates, data["bg_count_must_overlap"])
    log_frequency = frequency.log_frequencies(relations, candidates)
    close(log_frequency, data["pred_dist"])
    bias = frequency.FrequencyBias(log_frequency)
    close(bias.table.weight, data["embedding_weight"])
    labels = torch.from_numpy(data["pair_labels"])
    close(bias(labels[:, 0], labels[:, 1]), data["bias_for_labels"])
    probability = torch.from_numpy(data["pair_prob"])
    close(bias.expected(probability[..., 0], probability[..., 1]), data["bias_for_prob"])
    data = group(data, "box_filter")
    for name in {key.split(".")[0] for key in data}:
        pairs = frequency.candidate_pairs(data[f"{name}.boxes"])
        np.testing.assert_array_equal(pairs, data[f"{name}.pairs"], err_msg=name)


def test_losses(golden):
    data = arrays(golden, "loss")
    given = tensors(data)
    for key, value in data.items():
        if not key.endswith(("loss_rel", "loss_refine_obj")):
            continue
        smoothing = float(key.split("_")[2].rsplit(".", 1)[0]) if key.startswith("label_smoothing") else 0.0
        kind = "rel" if key.endswith("loss_rel") else "obj"
        logits, labels = given[f"{kind}_logits"], given[f"{kind}_labels"]
        total, count = relation_batch.predicate_loss(logits, labels, [len(labels)], smoothing)
        close(relation_batch.mean_or_zero(total, count)[0], value, name=key)
    for key in (key for key in data if key.endswith("_none")):
        smoothing = float(key.split("_")[2])
        every = [1] * len(given["rel_labels"])
        rows = relation_batch.predicate_loss(given["rel_logits"], given["rel_labels"], every, smoothing)[0]
        close(rows, data[key], name=key)
    targets, has_any = attribute_targets(given["attributes"], given["att_logits"].shape[1])
    assert torch.equal(targets, given["attribute_targets"])
    assert torch.equal(has_any.long(), given["attribute_fg"])
    total, count = relation_batch.attribute_loss(given["att_logits"], given["attributes"], [len(given["attributes"])])
    close(relation_batch.mean_or_zero(total, count)[0], data["with_attributes_no_sampling.loss_refine_att"])


def sgd(base_lrs: list[float]) -> torch.optim.SGD:
    return torch.optim.SGD([{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in base_lrs], lr=0.0)


CODE_DEFAULTS = {"gamma": 0.5, "warmup_factor": 1 / 3, "warmup_iters": 500, "warmup_method": "linear"}
PLATEAU_DEFAULTS = {"patience": 2, "threshold": 1e-4, "cooldown": 1}
OUR_OPTIONS = {"warmup_factor": "warmup_start", "warmup_iters": "warmup_steps"}


def plateau_schedule(case: dict) -> PlateauSchedule:
    options = CODE_DEFAULTS | PLATEAU_DEFAULTS | case["params"]
    options = {OUR_OPTIONS.get(key, key): value for key, value in options.items()}
    return PlateauSchedule(sgd(case["base_lrs"]), **options, max_decays=case["max_decay_step"] or 10**6)


def test_schedule(golden, schedule_case):
    case = document(golden, "schedule")["cases"][schedule_case]
    if case["kind"] == "WarmupMultiStepLR":
        return check_multistep(case)
    if case["params"].get("patience", 2) < 1:
        with pytest.raises(BadInput, match="patience"):
            plateau_schedule(case)
        return None
    return check_plateau(case)


def check_multistep(case: dict) -> None:
    params = CODE_DEFAULTS | {"gamma": 0.1} | case["params"]
    for step, expected in enumerate(case["lr_used"]):
        warm = {"warmup_steps": params["warmup_iters"]} | {k: params[k] for k in ("warmup_factor", "warmup_method")}
        factor = lr_factor(step, "multistep", milestones=params["milestones"], gamma=params["gamma"], **warm)
        np.testing.assert_allclose([lr * factor for lr in case["base_lrs"]], expected, rtol=1e-9)


def check_plateau(case: dict) -> None:
    """With the constructor's phantom validation of 0 put back, everything equals the original but the first rate."""
    schedule, params = plateau_schedule(case), CODE_DEFAULTS | case["params"]
    assert schedule.best is None and schedule.cooling == (PLATEAU_DEFAULTS | case["params"])["cooldown"], "not consumed"
    schedule.observe(0.0)
    after_init = case["state_after_init"]
    state = {"best": schedule.best, "under_cooldown": schedule.cooling, "stage_count": schedule.decays}
    assert state == {name: after_init[name] for name in state}
    for step, expected in enumerate(case["lr_used"]):
        schedule.set(step)
        rates = list(schedule.rates().values())
        if step == 0:  # the original starts counting at 1 and so uses the second rate twice
            assert expected == case["lr_after_init"]
            options = [params[f"warmup_{name}"] for name in ("iters", "factor", "method")]
            first, second = (warm_up(update, *options) for update in (0, 1))
            expected = [lr * first / second for lr in expected]
        np.testing.assert_allclose(rates, expected, rtol=1e-9, err_msg=f"step {step}")
        if case["val_seen"][step] is not None:
            schedule.observe(float(case["val_seen"][step]))
        assert schedule.decays == case["stage_count"][step]
        assert schedule.bad == case["num_bad_epochs"][step]
        assert schedule.cooling == case["under_cooldown"][step]
        np.testing.assert_allclose(schedule.best, case["best"][step], rtol=1e-9)
        assert schedule.finished == (case["stopped_at_iteration"] == step + 1)


def test_resume_keeps_the_schedule(golden):
    """Of four ways to resume, the original forgets the decays in three; we never do."""
    for case in document(golden, "clip_grad")["resume"].values():
        before = case["before_save"]
        schedule = PlateauSchedule(sgd([0.1]), gamma=0.1, warmup_steps=0)
        while schedule.decays < before["stage_count"]:
            schedule.observe(before["best"])
        again = PlateauSchedule(sgd([0.1]))
        again.load_state_dict(json.loads(json.dumps(schedule.state_dict())))
        again.set(before["last_epoch"] + 1)
        assert (again.decays, again.best) == (before["stage_count"], before["best"])
        np.testing.assert_allclose(again.rates()["0"], before["lr"], rtol=1e-9)


class Tree(torch.nn.Module):
    """A module whose parameters have the given names."""

    def __init__(self, names: list[str], trained: bool = True):
        super().__init__()
        for name in names:
            *path, leaf = name.split(".")
            node = self
            for part in path:
                if not hasattr(node, part):
                    node.add_module(part, torch.nn.Module())
                node = getattr(node, part)
            shape = (3,) if leaf == "bias" else (3, 2)
            node.register_parameter(leaf, torch.nn.Parameter(torch.zeros(shape), requires_grad=trained))


def test_optimizer_groups(golden):
    """The same but for weights with "bias" somewhere in their name: to us only a bias is a bias."""
    for cases in document(golden, "schedule")["optimizer_groups"].values():
        for case in cases:
            model = Tree([entry["name"] for entry in case["groups"]])
            for prefix in case["frozen_names"]:
                assert all(not entry["name"].startswith(prefix) for entry in case["groups"])
            rates = {"lr": case["base_lr"] * case["images_per_batch_factor"], "bias_lr_factor": case["bias_lr_factor"]}
            decays = {"weight_decay": case["weight_decay"], "bias_weight_decay": case["weight_decay_bias"]}
            slow = {"slow_prefixes": case["slow_heads"], "slow_factor": 1 / case["slow_ratio"]}
            groups = parameter_groups(model, **rates, **decays, **slow)
            ours = {name: (g["lr"], g["weight_decay"]) for g in groups for name in g["param_names"]}
            for entry in case["groups"]:
                lr, weight_decay = entry["lr"], entry["weight_decay"]
                if "bias" in entry["name"] and not entry["name"].endswith(".bias"):
                    lr, weight_decay = lr / case["bias_lr_factor"], case["weight_decay"]
                np.testing.assert_allclose(ours[entry["name"]], (lr, weight_decay), rtol=1e-9, err_msg=entry["name"])


def test_clipping(golden, clip_case):
    case = group(arrays(golden, "clip_grad"), clip_case)
    text = document(golden, "clip_grad")[clip_case]
    named = []
    for i, name in enumerate(text["names"]):
        parameter = torch.nn.Parameter(torch.zeros(case[f"grad_in_{i}"].shape))
        parameter.grad = torch.from_numpy(case[f"grad_in_{i}"]).clone()
        named.append((name, parameter))
    named += [(name, torch.nn.Parameter(torch.zeros(2))) for name in text["without_grad"]]
    max_norm = float(case["max_norm"])
    if text["log_lines"]:
        same_lines(gradient_table(named, max_norm).splitlines(), text["log_lines"])
    parameters = [parameter for _, parameter in named]
    norm = gradient_norm(parameters)  # norm and clipping as the training scripts have them
    if case["clip"]:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    if not np.isfinite(case["total_norm"]):  # left to the guard, which stops before the update
        assert not norm.isfinite()
        return
    np.testing.assert_allclose(float(norm), case["total_norm"], rtol=1e-5)
    for i, (name, parameter) in enumerate(named[: len(text["names"])]):
        np.testing.assert_allclose(parameter.grad, case[f"grad_out_{i}"], rtol=1e-5, atol=1e-12, err_msg=name)


def same_lines(ours: list[str], expected: list[str]) -> None:
    """The same text, numbers equal up to the last printed digit."""
    number = re.compile(r"\d+\.\d{5}")
    assert [number.sub("#", line) for line in ours] == [number.sub("#", line) for line in expected]
    for line, other in zip(ours, expected, strict=True):
        values = ([float(value) for value in number.findall(text)] for text in (line, other))
        np.testing.assert_allclose(*values, rtol=1e-5, atol=1.1e-5)


def test_weight_mapping(golden):
    case = document(golden, "clip_grad")["load_mapping"]
    checkpoint = {name: torch.tensor(float(i)) for i, name in enumerate(case["loaded_keys"])}
    model = {name: torch.tensor(-1.0) for name in case["model_keys"]}
    mapped = map_weights(model, checkpoint, case["mapping"])
    expected = {name: source for name, source in case["model_key_takes_value_of"].items() if source is not None}
    assert mapped.sources == expected
    assert set(mapped.new) == set(case["model_keys"]) - set(expected)
    for name, source in expected.items():
        assert mapped.state[name] == checkpoint[source]


def sample(case: dict[str, torch.Tensor], params: np.ndarray, generator: torch.Generator) -> pair_sampling.SampledPairs:
    fg_iou, require_overlap, per_relation, batch_size, fraction, given_boxes, _ = params.tolist()
    if given_boxes:
        return pair_sampling.sample_given_boxes(case["target_relation"], int(batch_size), fraction, generator)
    boxes = [case[key] for key in ("proposal_boxes", "proposal_labels", "target_boxes", "target_labels")]
    options = {"fg_iou": fg_iou, "require_overlap": bool(require_overlap), "per_relation": int(per_relation)}
    options |= {"batch_size": int(batch_size), "positive_fraction": fraction, "generator": generator}
    return pair_sampling.sample_detected_boxes(*boxes, case["target_relation"], **options)


def as_set(rows) -> set[tuple[int, ...]]:
    return {tuple(row) for row in rows.tolist()}


def test_sampling(golden, sampling_image):
    """Counts and candidate sets; the file lists what 20 draws of the original happened to bring up."""
    data = arrays(golden, "sampling")
    case = tensors(group(data, sampling_image))
    params = data[f"{sampling_image.split('.')[0]}.params"]
    fixed = bool(case["fg_fixed"]) and bool(case["bg_set_fixed"])
    seen = {"fg": set(), "bg": set()}
    for seed in range(3 if fixed else 200):
        drawn = sample(case, params, torch.Generator().manual_seed(seed))
        rows = torch.cat([drawn.pairs, drawn.labels[:, None]], 1)
        split = {"fg": rows[rows[:, 2] > 0], "bg": rows[rows[:, 2] == 0]}
        assert torch.equal(rows, torch.cat([split["fg"], split["bg"]])), "foreground comes first"
        assert torch.equal(drawn.related.long(), case["binary_rel"])
        assert drawn.related[split["fg"][:, 0], split["fg"][:, 1]].all()
        for kind, kind_rows in split.items():
            assert len(kind_rows) == case[f"num_{kind}"]
            seen[kind] |= as_set(kind_rows)
    for kind, is_fixed in (("fg", case["fg_fixed"]), ("bg", case["bg_set_fixed"])):
        listed = as_set(case[f"{kind}_union_over_draws"])
        assert seen[kind] == listed if is_fixed else seen[kind] >= listed


def test_sampling_of_given_boxes_draws_the_same_rows(golden):
    """The given-box rows use torch's generator only, so even the draws are those of the original."""
    data = arrays(golden, "sampling")
    for name in (key[: -len(".params")] for key in data if key.endswith(".params")):
        if not data[f"{name}.params"][5]:
            continue
        images = [image for image in prefixes(golden, "sampling", 2) if image.startswith(f"{name}.img")]
        for seed in (0, 1):
            generator = torch.Generator().manual_seed(seed)
            for image in images:
                drawn = sample(tensors(group(data, image)), data[f"{name}.params"], generator)
                rows = torch.cat([drawn.pairs, drawn.labels[:, None]], 1)
                np.testing.assert_array_equal(rows, data[f"{image}.out_seed{seed}"], err_msg=image)


def test_pairs_to_ask(golden):
    data = group(arrays(golden, "sampling"), "test_pairs")
    checked = 0
    for key in (key for key in data if key.endswith(".pairs")):
        given, overlap = ("use_gt_box_True" in key), ("require_overlap_True" in key)
        boxes = torch.from_numpy(data[f"{key.split('.')[2]}.boxes"])
        np.testing.assert_array_equal(pair_sampling.pairs_to_ask(boxes, overlap and not given), data[key], err_msg=key)
        checked += 1
    assert checked


def test_postprocess(golden, postprocess_case):
    case = group(arrays(golden, "postprocess"), postprocess_case)
    names = sorted({key.split(".")[0] for key in case if key.startswith("img")}, key=lambda name: int(name[3:]))
    images = [tensors(group(case, name)) for name in names]
    batch = concatenated(images, "rel_pair_idxs_in")
    output = RelationOutput(*(torch.cat([im[key] for im in images]) for key in ("obj_logits", "rel_logits")), None)
    options = {"given_boxes": bool(case["use_gt_box"]), "nms_threshold": float(case["later_nms_pred_thres"])}
    columns = postprocess.rank_triplets(output, batch, **options)
    graphs = postprocess.graphs_on_host(*columns, batch.num_objects, batch.num_pairs)
    for graph, expected in zip(graphs, images, strict=True):
        close(graph["boxes"], expected["out_boxes"])
        assert torch.equal(graph["labels"] + 1, expected["pred_labels"])
        close(graph["scores"], expected["pred_scores"])
        close(graph["triplet_scores"], expected["triple_scores"])
        ranked = expected["triple_scores"] > 0  # the order of triplets that score 0 is not defined
        for key, ours in (("rel_pair_idxs", graph["pairs"]), ("pred_rel_labels", graph["predicates"] + 1)):
            assert torch.equal(ours[ranked], expected[key][ranked]), key
        close(graph["predicate_scores"][ranked], expected["pred_rel_scores"][ranked, 1:])


def concatenated(images: list[dict[str, torch.Tensor]], pairs: str) -> RelationBatch:
    counts = [len(image["boxes"]) for image in images]
    starts = np.cumsum([0, *counts])
    return RelationBatch(
        boxes_xyxy=torch.cat([image["boxes"] for image in images]),
        sizes_hw=torch.zeros(len(images), 2),
        num_objects=counts,
        pairs=torch.cat([image[pairs] + start for image, start in zip(images, starts, strict=False)]),
        num_pairs=[len(image[pairs]) for image in images],
        roi_features=torch.zeros(0),
        boxes_per_class=torch.cat([image["boxes_per_cls"] for image in images]),
    )


@pytest.fixture(scope="session")
def vg_folder(golden, tmp_path_factory) -> Path:
    """The files of the data set, written from their arrays."""
    folder = tmp_path_factory.mktemp("vg")
    data = arrays(golden, "dataset")
    with h5py.File(folder / "VG-SGG-with-attri.h5", "w") as file:
        for key, value in group(data, "h5").items():
            file[key] = value
    columns = group(data, "image_data")
    rows = zip(*(column.tolist() for column in columns.values()), strict=True)
    entries = [dict(zip(columns, row, strict=True)) for row in rows]
    (folder / "image_data.json").write_text(json.dumps(entries))
    names = {"label": data["ind_to_classes"].tolist()[1:], "predicate": data["ind_to_predicates"].tolist()[1:]}
    info = {f"{kind}_to_idx": {name: n + 1 for n, name in enumerate(listed)} for kind, listed in names.items()}
    info["attribute_to_idx"] = {f"attribute {n + 1}": n + 1 for n in range(int(data["h5.attributes"].max(initial=0)))}
    (folder / "VG-SGG-dicts-with-attri.json").write_text(json.dumps(info))
    (folder / "images").mkdir()
    for entry in entries:
        if entry["image_id"] not in data["image_ids_without_file"]:
            (folder / "images" / f"{entry['image_id']}.jpg").touch()
    return folder


def split_options(name: str, data: dict[str, np.ndarray]) -> tuple[str, dict]:
    split, empty, overlap = name.split(".")
    dropped = split == "train" and overlap == "nonoverlap_dropped"
    options = {"num_val_images": int(data["num_val_im"]), "drop_non_overlapping": dropped}
    return split, options | {"keep_images_without_relations": empty == "emptyrels_kept"}


def test_dataset(golden, vg_folder, dataset_split):
    data = arrays(golden, "dataset")
    case = group(data, dataset_split)
    split, options = split_options(dataset_split, data)
    graphs = vg.load_graphs(vg_folder / "VG-SGG-with-attri.h5", split, **options)
    images = vg.load_image_list(vg_folder / "image_data.json", vg_folder / "images", len(data["h5.split"]))
    np.testing.assert_array_equal(graphs.index, np.flatnonzero(case["split_mask"]))
    assert [images[i]["image_id"] for i in graphs.index] == case["image_ids"].tolist()
    np.testing.assert_array_equal(np.concatenate(graphs.boxes), case["boxes_1024_xyxy"])
    np.testing.assert_array_equal(np.concatenate(graphs.labels), case["classes"])
    np.testing.assert_array_equal(np.concatenate(graphs.relations), case["rels"])
    np.testing.assert_array_equal(np.cumsum([0, *map(len, graphs.boxes)]), case["box_ptr"])
    np.testing.assert_array_equal(np.cumsum([0, *map(len, graphs.relations)]), case["rel_ptr"])
    sizes = [(images[i]["width"], images[i]["height"]) for i in graphs.index]
    scaled = [vg.scale_boxes(boxes, size) for boxes, size in zip(graphs.boxes, sizes, strict=True)]
    clipped = [vg.clip_to_last_pixel(boxes, size) for boxes, size in zip(scaled, sizes, strict=True)]
    if "eval_boxes_xyxy" in case:
        close(np.concatenate(clipped), case["eval_boxes_xyxy"], 1e-4)
        np.testing.assert_array_equal(np.concatenate(graphs.relations), case["eval_relation_tuple"])
        return
    if "train_boxes_xyxy" not in case:
        return
    kept = [vg.drop_empty(boxes, rels)[0] for boxes, rels in zip(clipped, graphs.relations, strict=True)]
    close(np.concatenate([b[k] for b, k in zip(clipped, kept, strict=True)]), case["train_boxes_xyxy"], 1e-4)
    np.testing.assert_array_equal(np.cumsum([0, *(k.sum() for k in kept)]), case["train_box_ptr"])
    labels = [labels[k] for labels, k in zip(graphs.labels, kept, strict=True)]
    np.testing.assert_array_equal(np.concatenate(labels), case["train_labels"])
    turned = [boxes[:, [2, 1, 0, 3]] * [-1, 1, -1, 1] for boxes in scaled]
    flipped = [vg.clip_to_last_pixel([w, 0, w, 0] + boxes, (w, h)) for boxes, (w, h) in zip(turned, sizes, strict=True)]
    flipped = [boxes[vg.drop_empty(boxes, np.zeros((0, 3), int))[0]] for boxes in flipped]
    close(np.concatenate(flipped), case["train_boxes_flipped_xyxy"], 1e-4)
    np.testing.assert_array_equal(np.cumsum([0, *map(len, flipped)]), case["train_flipped_box_ptr"])


def test_relation_matrices(golden, vg_folder, train_split):
    """One predicate per pair and draw: those always drawn are always drawn, the others take turns."""
    data = arrays(golden, "dataset")
    case = group(data, train_split)
    key = "train_relation_map_values_over_40_draws"
    split, options = split_options(train_split, data)
    reading = Reading(vg_folder / "images", check_images=False, cache_dir=vg_folder / "cache")
    table = vg.read_visual_genome(vg_folder, split, reading, **options)
    assert [table.row(i)["image_id"] for i in range(len(table))] == case["image_ids"].tolist()
    draws = 200
    for i in range(len(table)):
        row = table.row(i)
        rows = torch.from_numpy(np.stack([row["relations"][k] for k in ("subject", "object", "predicate")], 1))
        rows += torch.tensor([0, 0, 1])
        annotated, listed = as_set(rows), {tuple(r[1:4]) for r in case[key].tolist() if r[0] == i}
        for one_of_each in (True, False):
            seen = {}
            for seed in range(draws if len(annotated) > len({cell[:2] for cell in annotated}) else 1):
                generator = torch.Generator().manual_seed(seed)
                matrix = pair_sampling.relation_matrix(rows, len(row["objects"]["bbox"]), one_of_each, generator)
                pairs = matrix.nonzero()
                assert as_set(pairs) == {cell[:2] for cell in annotated}, "every annotated pair has a predicate"
                for cell in as_set(torch.cat([pairs, matrix[pairs[:, 0], pairs[:, 1], None]], 1)):
                    seen[cell] = seen.get(cell, 0) + 1
            assert listed <= set(seen) <= annotated


def test_head_logits(golden, head):
    """Images alone, and together: the original asserts one image per batch where labels are decoded."""
    data = arrays(golden, f"head_{head}")
    modules, cases = {}, cases_of(data, "eval")
    assert cases
    for case in cases:
        mode, _, *effect, images = case.split(".")
        if mode not in modules:
            modules[mode] = build_head(head, mode, data).eval()
        module = modules[mode]
        if effect or "causal" in head:
            module.effect = effect[0] if effect else "none"
        image = None if images == "batch" else int(images.removeprefix("img"))
        with torch.no_grad():
            output = module(head_batch(data, mode, image))
            together = module(head_batch(data, mode)) if image == 0 else output
        share = 1e-5 if not effect or effect[0] == "none" else 5e-4
        within(output.relation_logits, data[f"{case}.rel_dists"], share, case)
        within(output.object_logits, data[f"{case}.obj_dists"], 1e-5, case)
        if f"{case}.obj_preds" in data:
            np.testing.assert_array_equal(output.object_labels, data[f"{case}.obj_preds"], err_msg=case)
            within(output.context, data[f"{case}.edge_ctx"], 1e-5, case)
        if image == 0:
            alone = [data[f"{case[:-4]}img{i}.rel_dists"] for i in range(len(data["in.num_objs"]))]
            within(together.relation_logits, np.concatenate(alone), share, case)


def test_head_trees(golden, tree_head):
    data = arrays(golden, f"head_{tree_head}")
    cases = [key.removesuffix(".tree_root") for key in data if key.endswith(".tree_root")]
    for case in cases:
        mode, image = case.split(".")[0], int(case.rsplit("img", 1)[1])
        module = build_head(tree_head, mode, data).eval()
        batch = head_batch(data, mode, image)
        with torch.no_grad():
            forest, _ = module.context.plant(batch, label_embedding(module.context.embed_in, batch, mode))
        assert forest.levels[0].tolist() == [data[f"{case}.tree_root"]]
        for ours, key in ((forest.parent, "tree_parent"), (forest.left, "bitree_left"), (forest.right, "bitree_right")):
            np.testing.assert_array_equal(ours, data[f"{case}.{key}"], err_msg=f"{case} {key}")


def test_head_training(golden, head):
    """Logits, losses and gradients of the first step, then four SGD steps on the same batch."""
    data = arrays(golden, f"head_{head}")
    for case in cases_of(data, "train"):
        mode = case.split(".")[0]
        module = build_head(head, mode, data).train()
        lr, momentum = data["train.lr_momentum"].tolist()
        optimizer = torch.optim.SGD(module.parameters(), lr=lr, momentum=momentum)
        batch = head_batch(data, mode, train=True)
        names = data[f"{case}.loss_names"].tolist()
        assert set(module.loss_names) == set(names) - {"total_grad_norm"}
        for step, expected in enumerate(data[f"{case}.losses_per_step"]):
            output = module(batch)
            losses = relation_batch.head_losses(output, batch)
            values = {n: relation_batch.mean_or_zero(sums.sum(), counts.sum()) for n, (sums, counts) in losses.items()}
            optimizer.zero_grad()
            sum(values.values()).backward()
            learned = {name: p for name, p in module.named_parameters() if p.grad is not None}
            norms = {name: float(parameter.grad.double().norm()) for name, parameter in learned.items()}
            if step == 0:
                within(output.relation_logits, data[f"{case}.rel_dists"], 1e-5, case)
                within(output.object_logits, data[f"{case}.obj_dists"], 1e-5, case)
                check_first_gradients(head, case, data, norms)
            values["total_grad_norm"] = sum(norm**2 for norm in norms.values()) ** 0.5
            ours = [float(torch.as_tensor(values[name]).detach()) for name in names]
            # at most 6e-7 more than the 1e-6 in any step, on kernels for SSE and for AVX2
            np.testing.assert_allclose(ours, expected, rtol=5e-6, atol=1e-6, err_msg=f"{case} step {step}")
            optimizer.step()
        buffers = dict(module.named_buffers())
        for name, total in zip(data[f"{case}.buffer_names"].tolist(), data[f"{case}.final_buffers_sum"], strict=True):
            if (ours := our_name(head, name)) is not None:
                close(float(buffers[ours].double().sum()), total, 1e-4, f"{case} {name}")


def check_first_gradients(head: str, case: str, data: dict[str, np.ndarray], norms: dict[str, float]) -> None:
    names, expected = data[f"{case}.grad_norm_names"].tolist(), data[f"{case}.grad_norms"]
    largest = float(expected.max())
    for name, norm in zip(names, expected, strict=True):
        ours = our_name(head, name)
        assert ours is not None and abs(norms[ours] - norm) <= 1e-4 * norm + 1e-6 * largest, f"{case} {name}"
    without = {our_name(head, name) for name in data[f"{case}.params_without_grad"].tolist()}
    assert not {name for name in without if norms.get(name)}, f"{case}: the original has no gradient there"
