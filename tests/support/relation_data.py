"""Small relation heads and random batches of objects and pairs for them."""

import torch
import yaml

from scripts.benches.scene_graph import random_batch
from toolkit.detectors.scene_graphs.heads import HeadSizes, build_relation_head
from toolkit.detectors.scene_graphs.relation_batch import RelationBatch

CLASSES = 6
PREDICATES = 5
SIZES = HeadSizes(
    CLASSES,
    PREDICATES,
    roi_dim=8,
    union_dim=10,
    hidden_dim=8,
    pooling_dim=10,
    embed_dim=4,
)
SMALL = yaml.safe_load("""
    transformer: {heads: 2, key_dim: 3, value_dim: 3, inner_dim: 8, dropout: 0.0}
    penet: {dim: 16, dropout: 0.0}
    react: {dim: 16, dropout: 0.0}
    react_pp: {dim: 16, dropout: 0.0}
    squat: {dim: 16, dropout: 0.0, query_share: 0.1}
    imp: {}
    frequency: {}
""")


def head_of(name: str, mode: str, **options):
    torch.manual_seed(0)
    frequency = torch.randn(CLASSES, CLASSES, PREDICATES)
    return build_relation_head(
        name,
        mode,
        SIZES,
        frequency,
        **SMALL.get(name, {"dropout": 0.0}) | options,
    )


def batch_of(num_objects: list[int], seed: int = 0) -> RelationBatch:
    """A batch with everything that training and evaluation of any mode read."""
    batch = random_batch(num_objects, SIZES, seed)
    generator = torch.Generator().manual_seed(seed)
    total = sum(num_objects)
    noise = 5 * torch.randn(total, CLASSES, 1, generator=generator)
    batch.boxes_per_class = batch.boxes_xyxy[:, None] + noise
    batch.labels = torch.randint(1, CLASSES, (total,), generator=generator)
    batch.relation_labels = torch.randint(0, PREDICATES, (sum(batch.num_pairs),), generator=generator)
    batch.related = torch.rand(total, max(num_objects), generator=generator) > 0.5
    return batch


def image_of(batch: RelationBatch, i: int) -> RelationBatch:
    """One image of a batch, for evaluation."""
    columns = {"pairs": batch.pairs.split(batch.num_pairs)[i] - sum(batch.num_objects[:i])}
    columns["union_features"] = batch.union_features.split(batch.num_pairs)[i]
    for name in ("boxes_xyxy", "roi_features", "labels", "logits", "boxes_per_class"):
        columns[name] = getattr(batch, name).split(batch.num_objects)[i]
    counts = {"num_objects": [batch.num_objects[i]], "num_pairs": [batch.num_pairs[i]]}
    return RelationBatch(sizes_hw=batch.sizes_hw[i : i + 1], **columns, **counts)
