"""EGTR (Im et al., CVPR 2024): scene graphs in one stage, by a relation head on a DETR's decoder.

Boxes, classes and predicates come out of one forward and are trained together. The self-attention of every decoder
layer compares all queries with all keys. Predicates are predicted from those queries and keys and from the last hidden
states: no box is pooled, no pair is sampled (the paper's section 3). In naver-ai/egtr `model/egtr.py`, the features of
all layers are concatenated for every pair; here they are summed as two products of matrices, which gives the same
results with 1 / (layers + 1) of the memory. Other differences are listed in docs/differences.md.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from toolkit.base.batch import rows_of, to_host
from toolkit.base.box_ops import cxcywh_to_xyxy, denormalize_boxes
from toolkit.base.errors import BadInput
from toolkit.detectors.detr.detr_criterion import pad_targets
from toolkit.detectors.detr.rt_detr_criterion import MATCHING_COSTS
from toolkit.detectors.scene_graphs.egtr_criterion import (
    RelationSampling,
    count_entries,
    match_with_quality,
    relation_losses,
)
from toolkit.detectors.scene_graphs.frequency import log_prior
from toolkit.detectors.scene_graphs.graph_detector import GraphDetector, build_below, naming_its_options
from toolkit.detectors.scene_graphs.options import EgtrOptions
from toolkit.models.weights.mapping import WeightTable
from toolkit.step.freezing import freeze as freeze_module
from toolkit.step.freezing import hold_batch_norms

# Their decoders keep queries and keys apart, have one group of queries, and classify with sigmoids.
DETECTORS_BELOW = ("deformable_detr", "rt_detr_v2", "d_fine", "deimv2", "ecdet")
PUBLISHED_BELOW = {"architecture": "deformable_detr", "num_queries": 200}
MIN_FREQUENCY = 1e-12  # of a predicate that training had not, in the table of frequencies


class DecoderStates:
    """States of a decoder with Q queries of D channels: `queries` and `keys`, one (B, Q, D) for each layer, and `last`
    (B, Q, D), the output of the decoder."""

    def __init__(self):
        self.queries: list[Tensor] = []
        self.keys: list[Tensor] = []
        self.last: Tensor | None = None

    def of_last(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries and keys (B, count, L, D) of all L layers with D channels, and last states (B, count, D), of
        only the last `count` queries. These are the queries that detect; denoising queries come before them."""
        queries = torch.stack([layer[:, -count:] for layer in self.queries], 2)
        keys = torch.stack([layer[:, -count:] for layer in self.keys], 2)
        return queries, keys, self.last[:, -count:]


@contextmanager
def kept_states(layers: Sequence[nn.Module]) -> Iterator[DecoderStates]:
    """Yield a `DecoderStates` that is filled while the detector runs inside the context.

    layers: the layers of its decoder, which have `self_attn.q_proj` and `self_attn.k_proj`.
    """
    kept = DecoderStates()

    def keep_last(_, arguments: tuple, output) -> None:
        kept.last = output[0] if isinstance(output, tuple) else output

    def keep_query(_, arguments: tuple, output: Tensor) -> None:
        kept.queries.append(output)

    def keep_key(_, arguments: tuple, output: Tensor) -> None:
        kept.keys.append(output)

    with ExitStack() as stack:
        for layer in layers:
            stack.enter_context(layer.self_attn.q_proj.register_forward_hook(keep_query))
            stack.enter_context(layer.self_attn.k_proj.register_forward_hook(keep_key))
        stack.enter_context(layers[-1].register_forward_hook(keep_last))
        yield kept


class EgtrHead(nn.Module):
    """A head that predicts, for all ordered pairs of queries, the predicates and whether the pair has any relation.

    Args:
        width: number of channels D of the decoder.
        num_layers: number of layers L of the decoder.
        num_classes, num_predicates: without background.
        frequency_bias: add the logarithm of how often training had each predicate between the two classes.
    """

    def __init__(self, width: int, num_layers: int, num_classes: int, num_predicates: int, frequency_bias: bool = True):
        super().__init__()
        self.query_projections = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers))
        self.key_projections = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers))
        self.subject = nn.Linear(width, width)
        self.object = nn.Linear(width, width)
        self.gate = nn.Linear(2 * width, 1)
        self.predicate = _mlp(width, num_predicates)
        self.connectivity = _mlp(width, 1)
        table = torch.zeros(num_classes, num_classes, num_predicates) if frequency_bias else None
        self.register_buffer("log_frequency", table)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)  # the original's N(0, 0.02) fades in narrow decoders
                nn.init.zeros_(module.bias)

    @torch.no_grad()
    def start_from(self, counts: Tensor) -> None:
        """Set the table of frequencies from counts (C, C, P) of training relations by class of subject, class of object
        and predicate (P predicates), without background.

        As in the original, the table holds the logarithm of the counts. A predicate that two classes never had counts
        as a share of 1e-12; two classes that never had any predicate get 0.
        """
        if self.log_frequency is not None:
            counts = counts.double()
            smallest = MIN_FREQUENCY / (counts.sum(2, keepdim=True) + MIN_FREQUENCY)
            self.log_frequency.copy_((counts + smallest).log())

    def forward(self, queries: Tensor, keys: Tensor, states: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits of the P predicates, (B, Q, Q, P), and of any relation, (B, Q, Q), with subjects in dimension 1
        and objects in dimension 2.

        Args:
            queries, keys: (B, Q, L, D) of Q queries with D channels in the self-attention of the L decoder layers,
                before they are scaled.
            states: (B, Q, D) of the last layer.
            labels: (B, Q), the most probable class of each query, from 0.
        """
        subjects = self._sources(queries, self.query_projections, self.subject(states))
        objects = self._sources(keys, self.key_projections, self.object(states))
        # The gate is a linear layer of each pair's two vectors: what it makes of each is computed once a query.
        subject_weight, object_weight = self.gate.weight[0].chunk(2)
        of_subjects = subjects @ subject_weight  # (B, Q, L + 1)
        of_objects = objects @ object_weight
        gate = of_subjects[:, :, None] + of_objects[:, None] + self.gate.bias
        gate = gate.sigmoid()  # (B, Q, Q, L + 1)
        from_subjects = gate @ subjects  # (B, Q, Q, D)
        from_objects = (gate.transpose(1, 2) @ objects).transpose(1, 2)
        pairs = torch.cat([from_subjects, from_objects], -1)
        predicates = self.predicate(pairs)
        if self.log_frequency is not None:
            frequency = self.log_frequency[labels[:, :, None], labels[:, None]]
            predicates = predicates + frequency
        return predicates, self.connectivity(pairs)[..., 0]

    @staticmethod
    def _sources(of_layers: Tensor, projections: nn.ModuleList, of_states: Tensor) -> Tensor:
        """Return the stacked projections, (B, Q, L + 1, D)."""
        sources = []
        for projection, of_layer in zip(projections, of_layers.unbind(2), strict=True):
            sources.append(projection(of_layer))
        return torch.stack([*sources, of_states], 2)


def _mlp(width: int, out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(2 * width, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, out),
    )


class EGTR(GraphDetector):
    """A DETR whose detections have a scene graph.

    Args:
        class_names: one name each, in the order of the labels.
        options: settings, see `EgtrOptions`; `detector` is not read here.
        predicates: one name each, in the order of the labels.
        attributes: ignored; EGTR predicts none.

    Raises:
        BadInput: the detector is not one of `DETECTORS_BELOW`, settings have invalid values, or there are no
            predicates. One error names all of these faults.
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
        _check_options(o, (o.detector_options or PUBLISHED_BELOW).get("architecture"), predicates)
        self.predicates = tuple(predicates)
        self.smoothing = o.smoothing
        self.prior_adjustment = o.prior_adjustment
        self.sampling = RelationSampling(
            o.unrelated_per_relation,
            o.unmatched_per_relation,
            o.hardest_unrelated,
            o.hardest_unmatched,
        )
        with naming_its_options():
            below = build_below(o, PUBLISHED_BELOW, class_names)
        self._build_on(below)
        self.buffers_steer_training = below.buffers_steer_training
        self.joint = o.freeze != "detector"
        if not self.joint:
            freeze_module(below)
        if o.freeze == "norms":
            hold_batch_norms(below)
        config = below.model.config
        self.num_queries = config.num_queries
        if getattr(config, "two_stage", False):
            self.num_queries = config.two_stage_num_proposals
        self.head = EgtrHead(
            config.d_model,
            len(below.model.model.decoder.layers),
            len(class_names),
            len(predicates),
            o.frequency_bias,
        )
        self._make_counts(len(class_names), len(predicates))
        self._announce()

    def _announce(self) -> None:
        self.loss_names = ("loss_rel", "loss_connectivity")
        self.default_weights = {}
        self.divided_by = {"loss_rel": "relation_entries", "loss_connectivity": "images"}
        self.metric_names = ("relation_error",)
        if self.joint:
            self._below_announces()
        self.default_weights |= {"loss_rel": 15.0, "loss_connectivity": 30.0}

    def learn_counts(self, relations: np.ndarray, candidates: np.ndarray, seen: np.ndarray) -> None:
        """Store the training counts, see `GraphDetector.learn_counts`, and set the head's table of frequencies from
        them."""
        super().learn_counts(relations, candidates, seen)
        self.head.start_from(self.relation_counts[1:, 1:, 1:])

    def load_detector_weights(self, weights: Mapping[str, Tensor]) -> WeightTable:
        """Load the weights of a detector, and return from which tensor each parameter was loaded. Raises BadInput if
        shapes differ."""
        return self._load_below(weights, "detector", {})

    def forward(self, images: Tensor, sizes: Tensor, targets: Sequence[Mapping] | None = None) -> dict:
        """Return boxes, classes and predicates of all Q queries.

        Args:
            images: `(B, 3, H, W)` uint8, padded on the right and below.
            sizes: `(B, 2)` int64, height and width of each image without its padding.
            targets: with `boxes`, `labels`, `iscrowd`, `relations`; needed only if the detector is trained together
                with the relation head.

        Returns:
            `logits (B, Q, C)` and `boxes (B, Q, 4)`, cxcywh as fractions of the image without padding, both without
            gradient; logits of ordered pairs with subjects in dimension 1 and objects in dimension 2: `predicates (B,
            Q, Q, P)` for P predicates, and `connectivity (B, Q, Q)` for any relation; and `detector`, the input of the
            detector's own criterion, if the detector is trained too and targets are given.
        """
        with kept_states(self.detector.model.model.decoder.layers) as kept:
            outputs = self.detector(images, sizes, targets if self.joint else None)
        logits, boxes = (output.detach().float() for output in self.detector.last_layer(outputs))
        queries, keys, states = kept.of_last(logits.shape[1])
        labels = logits.argmax(-1)
        predicates, connectivity = self.head(queries, keys, states, labels)
        result = {
            "logits": logits,
            "boxes": boxes,
            "predicates": predicates,
            "connectivity": connectivity,
        }
        if self.joint and targets is not None:
            result["detector"] = outputs
        return result

    def denominators(self, targets: Sequence[Mapping]) -> dict[str, float]:
        """Return the number of images, the number of entries in the predicate loss (see `count_entries`), and, if the
        detector is trained, its own denominators."""
        entries = 0
        for target in targets:
            entries += sum(count_entries(target, self.num_queries, len(self.predicates), self.sampling))
        counts = {"relation_entries": float(entries), "images": float(len(targets))}
        if self.joint:
            counts |= self.detector.denominators(targets)
        return counts

    def criterion(self, outputs: Mapping, targets: Sequence[Mapping], denominators: Mapping):
        """Return losses by name, and metrics as (sum, count).

        `loss_rel`, `loss_connectivity`: see `relation_losses`. relation_error: per cent of the annotated relations for
        whose pair of queries the best predicate is not an annotated one.
        """
        with torch.autocast(outputs["predicates"].device.type, enabled=False):
            predicates = outputs["predicates"].float()
            connectivity = outputs["connectivity"].float()
            logits = outputs["logits"]
            boxes = outputs["boxes"]
            padded = pad_targets(targets, logits.device, logits.dtype)
            costs = getattr(self.detector.set_loss, "matching_costs", MATCHING_COSTS)
            matches, quality = match_with_quality(logits, boxes, padded, costs, self.smoothing)
            sums, error = relation_losses(
                predicates,
                connectivity,
                targets,
                matches,
                quality,
                self.sampling,
            )
            losses = {}
            for name, value in sums.items():
                losses[name] = value / denominators[self.divided_by[name]]
        if "detector" in outputs:
            of_detector, _ = self.detector.criterion(outputs["detector"], targets, denominators)
            losses |= of_detector
        return losses, {"relation_error": error}

    @torch.no_grad()
    def postprocess(
        self,
        outputs: Mapping,
        sizes: Tensor,
        orig_sizes: Tensor,
        score_threshold: float = 0.0,
        top_k: int = 100,
    ) -> list[dict[str, Tensor]]:
        """Return the graph of each image, in pixels of the original image.

        Pairs are ranked as in the original: by the product of the probability of the best predicate, the probability of
        any relation, and the softmax values of both classes.

        Returns:
            per image `boxes (M, 4)`, `scores (M,)` (sigmoids) and `labels (M,)` from 0 of the M queries whose score is
            above `score_threshold`; for the P best pairs of these, at most `top_k`, best first, `pairs (P, 2)`, rows of
            subject and object, `predicate_scores (P, predicates)`, `predicates (P,)` and `triplet_scores (P,)`.
        """
        graphs = []
        fields = to_host(self._ranked(outputs, orig_sizes, score_threshold, top_k))
        for kept, boxes, labels, scores, ends, predicate_scores, best, ranks in zip(*fields, strict=True):
            rows = ranks >= 0
            row_of = kept.cumsum(0) - 1  # of a query among those that are kept
            graph = {
                "boxes": boxes[kept],
                "labels": labels[kept],
                "scores": scores[kept],
                "pairs": row_of[ends[rows]],
                "predicate_scores": predicate_scores[rows],
                "predicates": best[rows],
                "triplet_scores": ranks[rows],
            }
            graphs.append(graph)
        return graphs

    def _ranked(self, outputs: Mapping, orig_sizes: Tensor, score_threshold: float, top_k: int) -> list[Tensor]:
        """Return, for all queries, whether they score above the threshold, boxes, labels and scores; for the `top_k`
        best pairs of these, both queries, the scores of all predicates, the best predicate, and the score of the
        triplet, which is below 0 for an invalid pair."""
        logits = outputs["logits"]
        relations = outputs["predicates"].float()
        if self.prior_adjustment:
            relations = relations - self.prior_adjustment * log_prior(self.relation_counts)[1:]
        relations = relations.sigmoid() * outputs["connectivity"].float().sigmoid()[..., None]
        scores, labels = logits.sigmoid().max(-1)
        sure = logits.softmax(-1).amax(-1)
        strong = scores > score_threshold
        best, predicates = relations.max(-1)
        triplets = best * sure[:, :, None] * sure[:, None]
        itself = torch.eye(logits.shape[1], dtype=torch.bool, device=logits.device)
        asked = strong[:, :, None] & strong[:, None] & ~itself
        ranked = triplets.masked_fill(~asked, -1.0)
        values, order = largest_first(ranked.flatten(1), top_k)  # (B, K)
        boxes = denormalize_boxes(cxcywh_to_xyxy(outputs["boxes"]), orig_sizes)
        count = logits.shape[1]
        return [
            strong,
            boxes,
            labels,
            scores,
            torch.stack([order // count, order % count], 2),  # of 3 queries, 5 is the pair 1, 2
            rows_of(relations.flatten(1, 2), order),
            rows_of(predicates.flatten(1), order),
            values,
        ]

    def decode_graph(self, images: Tensor, sizes: Tensor, top_k: int, pool: Callable) -> tuple[Tensor, ...]:
        """See `GraphDetector.decode_graph`."""
        outputs = self(images, sizes)
        ranked = self._ranked(outputs, sizes, 0.0, top_k)
        _, boxes, labels, scores, pairs, predicate_scores, _, values = ranked
        return boxes, scores, labels, pairs, predicate_scores, values.clamp(min=0)


def largest_first(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` largest values of each row of (B, N) float32, and their columns. Values below 0 mark invalid
    entries and come last, in any order.

    Equal values are in the order of their columns, also at the cut. `topk` does not guarantee that; a stable sort of
    200 queries' pairs takes ten times as long.
    """
    width = values.shape[1]
    if torch.compiler.is_exporting():  # ONNX's order is that of the columns
        return values.topk(min(count, width), dim=1)
    # A key is a value, and behind it how many columns follow: of the values 0.5, 0.9, 0.5 the keys are 0.5|2, 0.9|1 and
    # 0.5|0, and largest first come the columns 1, 0, 2.
    following = torch.arange(width - 1, -1, -1, device=values.device)
    bits = values.contiguous().view(torch.int32).long()  # the bits of such floats have their order
    keys = (bits << 32) + following
    largest = keys.topk(min(count, width)).values
    columns = width - 1 - (largest & 0xFFFFFFFF)
    return values.gather(1, columns), columns


def _check_options(o: EgtrOptions, architecture: str | None, predicates: Sequence[str]) -> None:
    faults = []
    if architecture not in DETECTORS_BELOW:
        given = f"model.detector_options: a detector of architecture {architecture!r}"
        supported = f"the decoder of egtr is that of {', '.join(DETECTORS_BELOW)}"
        faults.append(f"{given}; {supported}. train_sgg.py takes any detector with --model.head")
    if o.freeze not in ("detector", "norms", "none"):
        faults.append(f"model.freeze is {o.freeze!r}; expected detector, norms, none")
    if not 0 < o.smoothing < 1:
        faults.append(f"model.smoothing is {o.smoothing}; expected a number between 0 and 1")
    for name in ("unrelated_per_relation", "unmatched_per_relation"):
        count = getattr(o, name)
        if count < 0:
            faults.append(f"model.{name} is {count}; expected 0 or more")
    if not predicates:
        faults.append("the data names no predicates; scene graphs need data with relations")
    if faults:
        raise BadInput(faults)
