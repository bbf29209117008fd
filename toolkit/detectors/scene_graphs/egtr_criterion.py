"""The losses of EGTR's relation head (Im et al., CVPR 2024, section 3.3), as sums over entries whose number is known
from only the targets.

Values are those of naver-ai/egtr `model/egtr.py` (`SceneGraphGenerationLoss`) and its matcher. Queries have the objects
that the matching of the last decoder layer assigns to them. The target of an annotated relation is the product of the
qualities of its two detections (adaptive smoothing), so that poor detections are not trained towards certain relations.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from toolkit.base.batch import on_host, send
from toolkit.base.box_ops import cxcywh_to_xyxy, generalized_box_iou
from toolkit.base.seeding import image_generator
from toolkit.detectors.detr.detr_criterion import MatchingCosts, PaddedTargets, QueryMatches
from toolkit.detectors.detr.focal_criterion import ALPHA, focal_costs, match_focal


@dataclass
class RelationSampling:
    """The choice of the entries (subject, object, predicate) of an image that count in the predicate loss in addition
    to the annotated ones.

    unrelated: for each annotated relation, the number of entries between two objects that do not have that predicate.
    unmatched: for each annotated relation, the number of entries with a query that is not matched to an object.
    hardest_unrelated, hardest_unmatched: choose the entries with the highest scores instead of random ones.
    """

    unrelated: int = 80
    unmatched: int = 80
    hardest_unrelated: bool = True
    hardest_unmatched: bool = True


def relations_of(target: Mapping) -> Tensor:
    """Return the R relations (R, 3) of an image, subject, object and predicate from 0, on the host. Duplicates and
    relations of crowd regions are left out."""
    host = on_host(target)
    relations = host["relations"]
    if "iscrowd" in host:
        is_object = host["iscrowd"] == 0
        relations = relations[is_object[relations[:, :2]].all(1)]
    return relations.unique(dim=0)


def count_entries(
    target: Mapping,
    num_queries: int,
    num_predicates: int,
    sampling: RelationSampling,
) -> tuple[int, int, int]:
    """Return the numbers of annotated, unrelated and unmatched entries of an image in the predicate loss, using only
    its target.

    If there are more objects than queries, it is not known beforehand which objects are matched, and all relations are
    counted.
    """
    host = on_host(target)
    relations = len(relations_of(target))
    crowds = int(host["iscrowd"].sum()) if "iscrowd" in host else 0
    objects = len(host["labels"]) - crowds
    every = num_queries**2 * num_predicates
    inside = min(objects, num_queries) ** 2 * num_predicates  # between queries with an object
    unrelated = min(relations * sampling.unrelated, max(inside - relations, 0))
    unmatched = min(relations * sampling.unmatched, every - inside)
    return relations, unrelated, unmatched


@torch.no_grad()
def match_with_quality(
    logits: Tensor,
    boxes_cxcywh: Tensor,
    targets: PaddedTargets,
    costs: MatchingCosts,
    smoothing: float,
) -> tuple[QueryMatches, Tensor]:
    """Return the matching of one layer with Q queries, logits (B, Q, C) and boxes (B, Q, 4), and the quality (N,) of
    its N matched queries, each between 0 and 1.

    quality = 1 - sigmoid(cost - smallest possible cost + logit(smoothing)), which is 1 - `smoothing` for a perfect
    detection.
    """
    matches = match_focal(logits[None], boxes_cxcywh[None], targets, costs)
    predicted = boxes_cxcywh[matches.image, matches.query]
    wanted = targets.boxes_cxcywh[matches.image, matches.target]
    labels = targets.labels[matches.image, matches.target]
    class_cost = focal_costs(logits[matches.image, matches.query, labels])
    l1 = (predicted - wanted).abs().sum(1)
    giou = generalized_box_iou(cxcywh_to_xyxy(predicted), cxcywh_to_xyxy(wanted))
    cost = costs.bbox_cost * l1 + costs.class_cost * class_cost - costs.giou_cost * giou
    smallest = costs.class_cost * (1 - ALPHA) * math.log(1e-8) - costs.giou_cost
    quality = (smallest - cost + math.log(1 / smoothing - 1)).sigmoid()
    return matches, quality


def relation_losses(
    predicates: Tensor,
    connectivity: Tensor,
    targets: Sequence[Mapping],
    matches: QueryMatches,
    quality: Tensor,
    sampling: RelationSampling,
) -> tuple[dict[str, Tensor], tuple[Tensor, Tensor]]:
    """Return the sums of the two losses, and the metric `relation_error` as (sum in per cent, count).

    Args:
        predicates: (B, Q, Q, P) logits of P predicates for ordered pairs of Q queries, float32.
        connectivity: (B, Q, Q) logits of any relation, float32.
        targets: with `relations`, on any device.
        matches, quality: results of `match_with_quality`.

    Returns:
        `loss_rel`: binary cross-entropy, summed over the entries that `count_entries` counts. `loss_connectivity`: the
        mean over all pairs of queries of an image, summed over images.
    """
    batch_size, num_queries, _, num_predicates = predicates.shape
    device = predicates.device
    most = max((len(target["labels"]) for target in targets), default=0)
    query_of = torch.full((batch_size, most), -1, device=device)  # of each object; -1: none
    query_of[matches.image, matches.target] = matches.query
    of_query = torch.zeros(batch_size, num_queries, device=device)  # quality
    of_query[matches.image, matches.query] = quality.to(of_query)
    matched = torch.zeros(batch_size, num_queries, dtype=torch.bool, device=device)
    matched[matches.image, matches.query] = True
    loss = 0.0 * predicates.sum()  # images without relations have gradients, of 0
    related = torch.zeros_like(connectivity, requires_grad=False)
    wrong = predicates.new_zeros(())
    annotated = 0
    for i, target in enumerate(targets):
        counts = count_entries(target, num_queries, num_predicates, sampling)
        relations = send(relations_of(target), device)
        ends = query_of[i][relations[:, :2]]
        if len(target["labels"]) > num_queries:  # then some objects have no query
            has_both = (ends >= 0).all(1)
            ends = ends[has_both]
            relations = relations[has_both]
        subject, object_ = ends.unbind(1)  # queries
        entries = (subject, object_, relations[:, 2])
        related[i][subject, object_] = 1.0
        wanted = torch.zeros_like(predicates[i], dtype=torch.bool, requires_grad=False)
        wanted[entries] = True
        if len(relations):
            draw = image_generator(target, "entries", device)
            about = (entries, of_query[i], matched[i])
            loss = loss + _image_loss(predicates[i], wanted, *about, counts, sampling, draw)
        best = predicates[i].detach()[subject, object_].argmax(1)
        wrong = wrong + (~wanted[subject, object_, best]).sum()
        annotated = annotated + len(relations)
    by_pair = F.binary_cross_entropy_with_logits(connectivity, related, reduction="none")
    connected = by_pair.mean((1, 2)).sum()
    metric = 100.0 * wrong, predicates.new_full((), float(annotated))
    return {"loss_rel": loss, "loss_connectivity": connected}, metric


def _image_loss(predicates, wanted, entries, quality, matched, counts, sampling: RelationSampling, draw) -> Tensor:
    subject, object_, _ = entries
    _, num_unrelated, num_unmatched = counts
    inside = (matched[:, None] & matched[None])[..., None]  # (Q, Q, 1): both queries have an object
    logits = predicates.flatten()
    soft = quality[subject] * quality[object_]
    unrelated = _choose_entries(predicates, ~inside | wanted, num_unrelated, sampling.hardest_unrelated, draw)
    unmatched = _choose_entries(predicates, inside.expand_as(wanted), num_unmatched, sampling.hardest_unmatched, draw)
    others = logits[torch.cat([unrelated, unmatched])]
    loss = F.binary_cross_entropy_with_logits(predicates[entries], soft, reduction="sum")
    return loss + F.softplus(others).sum()  # the target of the others is 0


@torch.no_grad()
def _choose_entries(predicates: Tensor, left_out: Tensor, count: int, hardest: bool, draw: Generator | None) -> Tensor:
    """Return flat indices of `count` entries that are not left out: those of highest score, or random ones."""
    scores = predicates
    if not hardest:
        scores = torch.rand(
            predicates.shape,
            dtype=predicates.dtype,
            device=predicates.device,
            generator=draw,
        )
    possible = scores.masked_fill(left_out, -torch.inf)
    return possible.flatten().topk(count).indices
