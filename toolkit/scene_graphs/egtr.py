"""EGTR (Im et al., CVPR 2024): scene graphs in one stage, by a relation head on a DETR's decoder.

Boxes, classes and predicates come out of one forward and are trained together. What differs from naver-ai/egtr is
listed in docs/differences.md.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from toolkit.batch import rows_of, to_host
from toolkit.box_ops import cxcywh_to_xyxy, denormalize_boxes
from toolkit.errors import BadInput
from toolkit.models import build_detector
from toolkit.models.detr.detr_criterion import pad_targets
from toolkit.models.detr.rt_detr_criterion import MATCHING_COSTS
from toolkit.models.weights.mapping import WeightTable
from toolkit.scene_graphs.egtr_criterion import RelationSampling, count_entries, match_with_quality, relation_losses
from toolkit.scene_graphs.egtr_head import EgtrHead, kept_states
from toolkit.scene_graphs.frequency import log_prior
from toolkit.scene_graphs.graph_detector import GraphDetector, naming_its_options
from toolkit.scene_graphs.options import EgtrOptions
from toolkit.step.freezing import freeze as freeze_module
from toolkit.step.norms import hold_batch_norms

# Their decoders keep queries and keys apart, have one group of queries, and classify with sigmoids.
BELOW = ("deformable_detr", "rt_detr_v2", "d_fine", "deimv2")
PUBLISHED_BELOW = {"architecture": "deformable_detr", "num_queries": 200}


class EGTR(GraphDetector):
    """A DETR whose detections carry a graph.

    Args:
        class_names: one name each, in the order of the labels.
        options: settings, see `EgtrOptions`; `detector` is a note, it is not read here.
        predicates: one name each, in the order of the labels. attributes: not told, whatever they are.

    Raises:
        BadInput: another detector than one of `BELOW`, wrong options, no predicates; all of them.
    """

    Options = EgtrOptions
    counts_pairs_apart = True

    def __init__(
        self,
        class_names: Sequence[str],
        options: EgtrOptions,
        *,
        predicates: Sequence[str] = (),
        attributes: Sequence[str] = (),
    ):
        super().__init__()
        o = options
        chosen = dict(o.detector_options or PUBLISHED_BELOW)
        _check(o, chosen.get("architecture"), predicates)
        self.predicates, self.smoothing, self.prior_adjustment = tuple(predicates), o.smoothing, o.prior_adjustment
        self.sampling = RelationSampling(
            o.unrelated_per_relation, o.unmatched_per_relation, o.hardest_unrelated, o.hardest_unmatched
        )
        if o.backbone is not None:
            chosen["backbone"] = o.backbone
        with naming_its_options():
            below = build_detector(**chosen | {"pretrained_backbone": o.pretrained_backbone}, class_names=class_names)
        self.detector = below
        self.mean, self.std, self.stride, self.fixed_size = below.mean, below.std, below.stride, below.fixed_size
        self.buffers_steer_training = below.buffers_steer_training
        self.joint = o.freeze != "detector"
        if not self.joint:
            freeze_module(below)
        if o.freeze == "norms":
            hold_batch_norms(below)
        config = below.model.config
        self.num_queries = config.two_stage_num_proposals if getattr(config, "two_stage", False) else config.num_queries
        layers = len(self._decoder_layers())
        self.head = EgtrHead(config.d_model, layers, len(class_names), len(predicates), o.frequency_bias)
        self._make_counts(len(class_names), len(predicates))
        self._announce()

    def _announce(self) -> None:
        self.loss_names, self.default_weights = ("loss_rel", "loss_connectivity"), {}
        self.divided_by = {"loss_rel": "relation_entries", "loss_connectivity": "images"}
        self.metric_names = ("relation_error",)
        if self.joint:
            self._below_announces()
        self.default_weights |= {"loss_rel": 15.0, "loss_connectivity": 30.0}

    def _decoder_layers(self) -> Sequence[torch.nn.Module]:
        return self.detector.model.model.decoder.layers

    def learn_counts(self, relations: np.ndarray, candidates: np.ndarray, seen: np.ndarray) -> None:
        """See `GraphDetector.learn_counts`; starts the table of frequencies too."""
        super().learn_counts(relations, candidates, seen)
        self.head.start_from(self.relation_counts[1:, 1:, 1:])

    def load_detector_weights(self, weights: Mapping[str, Tensor]) -> WeightTable:
        """Takes the weights of a detector and says which parameter took which. Raises BadInput for other shapes."""
        return self._load_below(weights, "detector", {})

    def forward(self, images: Tensor, sizes: Tensor, targets: Sequence[Mapping] | None = None) -> dict:
        """Boxes, classes and predicates of all queries.

        Args:
            images: `(B, 3, H, W)` uint8, padded on the right and below. sizes: `(B, 2)` int64 without padding.
            targets: with `boxes`, `labels`, `iscrowd`, `relations`; needed to train the detector along.

        Returns:
            `logits (B, Q, C)` and `boxes (B, Q, 4)` cxcywh as fractions of the image, without gradient;
            `predicates (B, Q, Q, P)` and `connectivity (B, Q, Q)` logits of ordered pairs, subjects first; `detector`:
            what the detector's own criterion takes, where it is trained too.
        """
        with kept_states(self._decoder_layers()) as kept:
            outputs = self.detector(images, sizes, targets if self.joint else None)
        logits, boxes = (each.detach().float() for each in self.detector.last_layer(outputs))
        states = kept.of_last(logits.shape[1])
        predicates, connectivity = self.head(*states, logits.argmax(-1))
        found = {"logits": logits, "boxes": boxes, "predicates": predicates, "connectivity": connectivity}
        return found | {"detector": outputs} if self.joint and targets is not None else found

    def denominators(self, targets: Sequence[Mapping]) -> dict[str, float]:
        """Images, entries in the loss of predicates (`count_entries`), and the detector's where it is trained too."""
        size = self.num_queries, len(self.predicates)
        entries = sum(sum(count_entries(target, *size, self.sampling)) for target in targets)
        counts = {"relation_entries": float(entries), "images": float(len(targets))}
        return counts | (self.detector.denominators(targets) if self.joint else {})

    def criterion(self, outputs: Mapping, targets: Sequence[Mapping], denominators: Mapping):
        """Losses and metrics (sum, count).

        `loss_rel`, `loss_connectivity`: see `relation_losses`. relation_error: per cent of the annotated relations
        whose pair of queries has a best predicate that is not annotated.
        """
        with torch.autocast(outputs["predicates"].device.type, enabled=False):
            predicates, connectivity = outputs["predicates"].float(), outputs["connectivity"].float()
            logits, boxes = outputs["logits"], outputs["boxes"]
            padded = pad_targets(targets, logits.device, logits.dtype)
            costs = getattr(self.detector.set_loss, "matching_costs", MATCHING_COSTS)
            found = match_with_quality(logits, boxes, padded, costs, self.smoothing)
            sums, error = relation_losses(predicates, connectivity, targets, *found, self.sampling)
            losses = {name: value / denominators[self.divided_by[name]] for name, value in sums.items()}
        if "detector" in outputs:
            losses |= self.detector.criterion(outputs["detector"], targets, denominators)[0]
        return losses, {"relation_error": error}

    @torch.no_grad()
    def postprocess(
        self, outputs: Mapping, sizes: Tensor, orig_sizes: Tensor, score_threshold: float = 0.0, top_k: int = 100
    ) -> list[dict[str, Tensor]]:
        """The graph of each image, in pixels of the original image.

        A pair is ranked by the probability of its best predicate x that of any relation x the softmax values of both
        classes, as in the original.

        Returns:
            per image `boxes (M, 4)`, `scores (M,)` (sigmoids) and `labels (M,)` from 0 of the queries whose score is
            above `score_threshold`; `pairs (P, 2)`, the `top_k` best of them, best first, `predicate_scores
            (P, predicates)`, `predicates (P,)`, `triplet_scores (P,)`.
        """
        logits = outputs["logits"]
        relations = outputs["predicates"].float()
        if self.prior_adjustment:
            relations = relations - self.prior_adjustment * log_prior(self.relation_counts)[1:]
        relations = relations.sigmoid() * outputs["connectivity"].float().sigmoid()[..., None]
        scores, labels = logits.sigmoid().max(-1)
        sure, strong = logits.softmax(-1).amax(-1), scores > score_threshold
        best, predicates = relations.max(-1)
        triplets = best * sure[:, :, None] * sure[:, None]
        asked = strong[:, :, None] & strong[:, None]
        asked.diagonal(dim1=1, dim2=2).fill_(False)
        values, order = triplets.masked_fill(~asked, -1.0).flatten(1).topk(min(top_k, triplets[0].numel()))
        boxes, count = denormalize_boxes(cxcywh_to_xyxy(outputs["boxes"]), orig_sizes), logits.shape[1]
        found = [strong, boxes, labels, scores, torch.stack([order // count, order % count], 2)]
        found += [rows_of(relations.flatten(1, 2), order), rows_of(predicates.flatten(1), order), values]
        graphs = []
        for kept, *objects, ends, predicate_scores, best, ranks in zip(*to_host(found), strict=True):
            rows = ranks >= 0
            graph = dict(zip(("boxes", "labels", "scores"), (each[kept] for each in objects), strict=True))
            graph |= {"pairs": (kept.cumsum(0) - 1)[ends[rows]], "predicate_scores": predicate_scores[rows]}
            graphs.append(graph | {"predicates": best[rows], "triplet_scores": ranks[rows]})
        return graphs


def _check(o: EgtrOptions, architecture: str | None, predicates: Sequence[str]) -> None:
    faults = []
    if architecture not in BELOW:
        faults.append(f"model.detector_options: a detector of architecture {architecture!r}; the decoder of egtr is "
                      f"that of {', '.join(BELOW)}. train_sgg.py takes any detector with --model.head")  # fmt: skip
    if o.freeze not in ("detector", "norms", "none"):
        faults.append(f"model.freeze is {o.freeze!r}; expected detector, norms, none")
    if not 0 < o.smoothing < 1:
        faults.append(f"model.smoothing is {o.smoothing}; expected a number between 0 and 1")
    faults += [f"model.{name} is {getattr(o, name)}; expected 0 or more"
               for name in ("unrelated_per_relation", "unmatched_per_relation") if getattr(o, name) < 0]  # fmt: skip
    if not predicates:
        faults.append("the data names no predicates; scene graphs need data with relations")
    if faults:
        raise BadInput(faults)
