"""Shapes with relations, small scene graph models on them, graphs for metrics, and stored numbers of other programs."""

import re

import numpy as np
import torch
import yaml
from places import ASSETS
from rows import boxes, integers

from toolkit.data.formats import open_dataset
from toolkit.data.pipeline import val_transform, validation_loader
from toolkit.detectors.scene_graphs.start import count_table
from toolkit.evaluation.predict_dataset import predict_dataset
from toolkit.models import build_detector
from toolkit.step.losses import LossWeights
from toolkit.tools.shapes import make_shapes

SIDE = 64
INNER = yaml.safe_load("""
    freeze: none
    strides: [8, 16]
    fpn_channels: 8
    representation_size: 16
    anchor_sizes: [[16], [32]]
    rpn_post_nms_top_n_test: 12
    rpn_post_nms_top_n_train: 12
""")
OPTIONS = yaml.safe_load("""
    backbone: test_resnet
    hidden_dim: 8
    embed_dim: 4
    pairs_per_image: 16
    detections_per_image: 5
""")
OF_HEADS = ("penet", "react", "react_pp", "squat")
NARROW = dict.fromkeys(OF_HEADS, {"dim": 32})  # of 2048, half precision is slow on some CPUs
OF_OBJECTS = ("boxes", "labels", "area", "iscrowd", "attributes")
WITHOUT_VALUE = ("pretrained", "detector", "word_vectors", "norm_momentum")  # settings of a graph that can be None
BOXES = "0 0 20 20, 50 50 80 80, 0 60 30 90"


def shapes_table(folder, images=6):
    make_shapes(folder / "data", train_images=images, val_images=1, image_size=SIDE)
    return open_dataset(folder / "data" / "annotations" / "train.json", cache_dir=folder / "cache")


def loader_of(table):
    """All images in one batch."""
    return validation_loader(
        table,
        val_transform(SIDE, [], 0),
        batch_size=len(table),
        workers=0,
        stride=32,
    )


def cut_objects(target: dict, count: int, crowd: bool = False) -> None:
    """Leaves the first objects, without relations."""
    target.update({key: target[key][:count] for key in OF_OBJECTS})
    target["relations"] = target["relations"][:0]
    if crowd:
        target["iscrowd"] = torch.ones(count, dtype=torch.int64)


def edge_batch(table):
    """Six images as they are; then the first without objects, the second with one, the third with a crowd only."""
    batch = next(iter(loader_of(table)))
    cut_objects(batch.targets[0], 0)
    cut_objects(batch.targets[1], 1)
    cut_objects(batch.targets[2], 1, crowd=True)
    return batch


def model_of(table, mode="predcls", head="motifs", **options):
    torch.manual_seed(0)
    options = OPTIONS | {"detector_options": INNER} | options
    options["head_options"] = NARROW.get(head, {}) | options.get("head_options", {})
    names = {"class_names": table.class_names, "predicates": list(table.predicates)}
    model = build_detector(
        "scene_graph", mode=mode, head=head, **names, **OPTIONS | {"detector_options": INNER} | options
    )
    model.learn_counts(*count_table(table))
    return model


def as_denominators(counts):
    return {name: torch.tensor(max(value, 1.0)) for name, value in counts.items()}


def criterion_of(model, outputs, targets, counts=None):
    """Losses and metrics; counts: the denominators, those of these images unless given."""
    return model.criterion(outputs, targets, as_denominators(counts or model.denominators(targets)))


def losses_of(model, batch, rows=slice(None), counts=None):
    """Losses and metrics of some images of a batch."""
    targets = batch.targets[rows]
    outputs = model(batch.images[rows], batch.sizes[rows], targets)
    return criterion_of(model, outputs, targets, counts)


@torch.no_grad()
def graphs_of(model, batch, targets=None, **options):
    return model.postprocess(
        model(batch.images, batch.sizes, targets),
        batch.sizes,
        batch.sizes,
        **options,
    )


def predictions_of(model, table, **options):
    """By image id, as an evaluation keeps them."""
    weights = LossWeights(model.loss_names, {}, model.default_weights)
    return predict_dataset(model, loader_of(table), "cpu", loss_weights=weights, **options).by_image


def truth(relations: str, of_boxes: str = BOXES, labels: str | None = None):
    """An annotated graph of relations `"subject object predicate, ..."`; labels count the boxes unless given."""
    numbered = boxes(of_boxes).numpy()
    return {
        "boxes": numbered,
        "labels": np.arange(len(numbered)) if labels is None else integers(labels).numpy(),
        "relations": integers(relations, 3).numpy(),
    }


def prediction(relations: str, num_predicates: int = 4, of_boxes: str = BOXES, labels: str | None = None):
    """One confident predicate for each pair, the first pair the surest."""
    graph = truth(relations, of_boxes, labels)
    triplets = graph.pop("relations")
    scores = np.full((len(triplets), num_predicates), 0.01, np.float32)
    scores[np.arange(len(triplets)), triplets[:, 2]] = np.linspace(
        0.9,
        0.5,
        len(triplets),
    )
    of_boxes = np.ones(len(graph["boxes"]), np.float32)
    return graph | {"scores": of_boxes, "pairs": triplets[:, :2], "predicate_scores": scores}


def arrays(name: str) -> dict[str, torch.Tensor]:
    """A file of `relation_heads`."""
    with np.load(ASSETS / "relation_heads" / f"{name}.npz") as stored:
        return {key: torch.from_numpy(stored[key]) for key in stored.files}


def part(data: dict, prefix: str) -> dict:
    return {key.removeprefix(prefix): value for key, value in data.items() if key.startswith(prefix)}


def renamed(state: dict, names: str) -> dict:
    """Weights by our names; names: a line `pattern replacement` each, used one after the other."""
    ours = {}
    for key, value in state.items():
        for line in names.strip().splitlines():
            pattern, _, replacement = line.partition(" ")
            key = re.sub(pattern, replacement, key)
        ours[key] = value
    return ours


def load_original(module: torch.nn.Module, state: dict, names: str) -> None:
    """Every weight and buffer of ours has one in the original but the counters of batch norms."""
    ours = renamed(state, names)
    own = module.state_dict()
    assert ours.keys() <= own.keys()
    counters = {key: value for key, value in own.items() if "num_batches" in key}
    module.load_state_dict(ours | counters)
