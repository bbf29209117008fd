"""Shapes with relations, small scene graph models on them, and stored numbers of other programs, for tests."""

import re

import numpy as np
import torch
from places import ASSETS

from toolkit.data.formats import open_dataset
from toolkit.data.pipeline import val_transform, validation_loader
from toolkit.detectors.scene_graphs.start import count_table
from toolkit.models import build_detector
from toolkit.tools.shapes import make_shapes

SIDE = 64
INNER = {"freeze": "none", "strides": [8, 16], "fpn_channels": 8, "representation_size": 16,
         "anchor_sizes": [[16], [32]], "rpn_post_nms_top_n_test": 12, "rpn_post_nms_top_n_train": 12}  # fmt: skip
OPTIONS = {"backbone": "test_resnet", "detector_options": INNER, "hidden_dim": 8, "embed_dim": 4, "pairs_per_image": 16,
           "detections_per_image": 5}  # fmt: skip
OF_HEADS = ("penet", "react", "react_pp", "squat")
NARROW = dict.fromkeys(OF_HEADS, {"dim": 32})  # of 2048, half precision is slow on some CPUs
OF_OBJECTS = ("boxes", "labels", "area", "iscrowd", "attributes")


def shapes_table(folder, images=6):
    make_shapes(folder / "data", train_images=images, val_images=1, image_size=SIDE)
    return open_dataset(folder / "data" / "annotations" / "train.json", cache_dir=folder / "cache")


def loader_of(table):
    """All images in one batch."""
    return validation_loader(table, val_transform(SIDE, [], 0), batch_size=len(table), workers=0, stride=32)


def cut_objects(target: dict, count: int, crowd: bool = False) -> None:
    """Leaves the first objects, without relations."""
    target.update({key: target[key][:count] for key in OF_OBJECTS})
    target["relations"] = target["relations"][:0]
    if crowd:
        target["iscrowd"] = torch.ones(count, dtype=torch.int64)


def model_of(table, mode="predcls", head="motifs", **options):
    torch.manual_seed(0)
    options["head_options"] = NARROW.get(head, {}) | options.get("head_options", {})
    model = build_detector("scene_graph", class_names=table.class_names, predicates=list(table.predicates),
                           mode=mode, head=head, **OPTIONS | options)  # fmt: skip
    model.learn_counts(*count_table(table))
    return model


def as_denominators(counts):
    return {name: torch.tensor(max(value, 1.0)) for name, value in counts.items()}


def losses_of(model, batch, rows=slice(None), counts=None):
    """Losses and metrics of some images of a batch; counts: the denominators, those of these images unless given."""
    images, sizes, targets = batch.images[rows], batch.sizes[rows], batch.targets[rows]
    counts = as_denominators(counts or model.denominators(targets))
    return model.criterion(model(images, sizes, targets), targets, counts)


def arrays(name: str) -> dict[str, torch.Tensor]:
    """A file of `data/relation_heads`."""
    with np.load(ASSETS / "relation_heads" / f"{name}.npz") as stored:
        return {key: torch.from_numpy(stored[key]) for key in stored.files}


def part(data: dict, prefix: str) -> dict:
    return {key.removeprefix(prefix): value for key, value in data.items() if key.startswith(prefix)}


def renamed(state: dict, names) -> dict:
    """Weights by our names; names: (pattern, replacement), used one after the other."""
    ours = {}
    for key, value in state.items():
        for pattern, replacement in names:
            key = re.sub(pattern, replacement, key)
        ours[key] = value
    return ours
