"""Scene graphs in two stages: a relation head on a Faster R-CNN, as Scene-Graph-Benchmark (Tang et al.) trains it, or
on another detector.

The heads are in the folder `heads`, one file each. This module has the parts that they share: the choice of objects,
the features of objects and pairs, losses and predictions. Differences from the original are listed in
docs/differences.md.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from toolkit.base.batch import on_host, send_dicts
from toolkit.base.errors import BadInput
from toolkit.base.seeding import image_generator
from toolkit.detectors.faster_rcnn.model import FasterRCNN
from toolkit.detectors.scene_graphs.detector_below import DetectorBelow
from toolkit.detectors.scene_graphs.frequency import (
    FrequencyBias,
    class_balanced_weights,
    log_frequencies,
    log_prior,
    predicate_weights,
)
from toolkit.detectors.scene_graphs.graph_detector import GraphDetector, build_below, naming_its_options
from toolkit.detectors.scene_graphs.heads import RELATION_HEADS, HeadSizes, build_relation_head
from toolkit.detectors.scene_graphs.heads.react_pp import ReactPlusPlusHead
from toolkit.detectors.scene_graphs.heads.vctree import PairScores
from toolkit.detectors.scene_graphs.options import SceneGraphOptions
from toolkit.detectors.scene_graphs.pair_sampling import (
    annotated_graph,
    count_sampled_pairs,
    detected_objects,
    given_objects,
    sampled_pairs,
)
from toolkit.detectors.scene_graphs.postprocess import graphs_on_host, rank_triplets, shortlist, strong_only
from toolkit.detectors.scene_graphs.relation_batch import (
    GRAPH_MODES,
    RelationBatch,
    RelationOutput,
    attribute_loss,
    head_losses,
    mean_or_zero,
)
from toolkit.detectors.scene_graphs.traced import TRACEABLE_HEADS, decode_graph
from toolkit.detectors.scene_graphs.union import AllLevelsPool, UnionFeatures
from toolkit.models.detector import Detector
from toolkit.models.weights.mapping import WeightTable
from toolkit.step.freezing import freeze as freeze_module
from toolkit.step.freezing import freeze_prefixes, hold_batch_norms, set_bn_momentum

GRAPH_FREEZE_CHOICES = ("detector", "norms", "detector_and_norms", "none")


class SceneGraph(GraphDetector):
    """A detector whose detections have a scene graph.

    The counts of the training split are set with `learn_counts`; they are saved with the weights.

    Args:
        class_names: one name each, in the order of the labels.
        options: settings, see `SceneGraphOptions`; `detector` and `word_vectors` are not read here.
        predicates: one name each, in the order of the labels.
        attributes: names of the attributes, in the order of their ids in the data, which a linear classifier on the box
            features predicts. This classifier is not built without names, nor with
            the frequency head, which has no features.

    Raises:
        BadInput: the mode, the head or another setting is invalid, or there are no predicates. One error names all of
            these faults.
    """

    Options = SceneGraphOptions

    def __init__(
        self,
        class_names: Sequence[str],
        options: SceneGraphOptions,
        *,
        predicates: Sequence[str] = (),
        attributes: Sequence[str] = (),
    ):
        super().__init__()
        o = options
        freeze = o.freeze or ("none" if o.detector is None else "detector")
        _check_options(o, freeze, predicates)
        self._freeze = freeze
        self.predicates = tuple(predicates)
        self._take_settings(o)
        holds_detector = freeze in ("detector", "detector_and_norms")
        self.joint = not holds_detector and o.mode != "predcls"
        below = _build_below(class_names, o, self.joint)
        self._build_on(below)
        self._build_features(below, o)
        if holds_detector:
            freeze_module(_detector_of(below))
        elif o.mode == "predcls" and not isinstance(below, DetectorBelow):  # they are not used and must not be trained
            freeze_module(below.rpn)
            freeze_module(below.roi_heads)
        width = below.representation_size
        sizes = HeadSizes(
            num_classes=len(class_names) + 1,
            num_predicates=len(predicates) + 1,
            roi_dim=width,
            union_dim=width,
            hidden_dim=o.hidden_dim,
            pooling_dim=width,
            embed_dim=o.embed_dim,
        )
        self.head = _build_head(o, sizes)
        self.reads_union = getattr(self.head, "reads_union", True)
        if not self.reads_union:
            freeze_module(self.union)
        if o.norm_momentum is not None:
            set_bn_momentum(nn.ModuleList([self.head, self.union]), o.norm_momentum)
        self.attributes = () if o.head == "frequency" else tuple(attributes)
        self.attribute_predictor = _attribute_predictor(width, len(self.attributes)) if self.attributes else None
        self._make_counts(len(class_names), len(predicates))
        self.register_buffer("predicate_weights", torch.ones(sizes.num_predicates))
        self._announce(o.head)
        if freeze in ("norms", "detector_and_norms"):
            hold_batch_norms(self)
            if isinstance(self.head, ReactPlusPlusHead):
                self.head.prototypes.moves = False
        if "loss_refine_obj" not in self.loss_names:  # nothing else would train them
            freeze_prefixes(self.head, getattr(self.head, "of_labels", ()))

    def _take_settings(self, o: SceneGraphOptions) -> None:
        self.mode = o.mode
        self.given_boxes = o.mode != "sgdet"
        self.pairs_per_image = o.pairs_per_image
        self.positive_fraction = o.positive_fraction
        self.pairs_per_relation = o.pairs_per_relation
        self.match_iou = o.match_iou
        self.add_annotated_boxes = o.add_annotated_boxes
        self.require_overlap = o.require_overlap
        self.label_smoothing = o.label_smoothing
        self.detections_per_image = o.detections_per_image
        self.nms_threshold = o.nms_threshold
        self.rare_predicate_power = o.rare_predicate_power
        self.class_balanced_beta = o.class_balanced_beta
        self.prior_adjustment = o.prior_adjustment
        self.embed_dim = o.embed_dim
        self.last_pixel = float(o.whole_pixels)

    def _build_features(self, below: nn.Module, o: SceneGraphOptions) -> None:
        """Build the features of objects and of union boxes, which start as copies of the detector's box head."""
        box_head = below.make_box_head() if isinstance(below, DetectorBelow) else below.box_head
        self.box_features = copy.deepcopy(box_head)
        pool = copy.deepcopy(below.box_pool)
        if o.union_levels == "all":
            pool = AllLevelsPool(pool, below.map_channels)
        self.union = UnionFeatures(
            pool,
            copy.deepcopy(box_head),
            below.map_channels,
            separate_spatial=below.representation_size if o.separate_spatial else 0,
            last_pixel=self.last_pixel,
        )

    def _announce(self, head: str) -> None:
        self.loss_names = self.head.loss_names or ("loss_rel",)
        given = self.mode == "predcls" or not getattr(self.head, "of_labels", ())
        if given and not getattr(self.head, "translates", False):  # nothing to learn about objects
            self.loss_names = tuple(name for name in self.loss_names if name != "loss_refine_obj")
        if self.attributes:
            self.loss_names += ("loss_refine_att",)
        self.relation_losses = self.loss_names
        self.divided_by = dict.fromkeys(self.relation_losses, "images")
        if self.given_boxes:
            self.divided_by = {name: _divisor(name) for name in self.relation_losses}
        self.metric_names = ("relation_error",) if self.mode == "predcls" else ("relation_error", "object_error")
        self.default_weights = dict.fromkeys(self.relation_losses, 1.0)
        if self.joint:
            self._below_announces()
        self.slow_prefixes = ("box_features", "union.head") if head == "imp" else ()

    def resolved_options(self) -> dict:
        return super().resolved_options() | {"freeze": self._freeze}

    @torch.no_grad()
    def learn_counts(self, relations: np.ndarray, candidates: np.ndarray, seen: np.ndarray) -> None:
        """Store the training counts, see `GraphDetector.learn_counts`, and set the frequency bias and the weights of
        the predicates from them."""
        super().learn_counts(relations, candidates, seen)
        log_frequency = log_frequencies(relations, candidates)
        for module in self.head.modules():
            if isinstance(module, FrequencyBias | PairScores):
                module.start_from(log_frequency)
        if self.rare_predicate_power:
            self.predicate_weights.copy_(predicate_weights(relations, self.rare_predicate_power))
        elif self.class_balanced_beta:
            self.predicate_weights.copy_(class_balanced_weights(relations, self.class_balanced_beta))

    def load_detector_weights(self, weights: Mapping[str, Tensor]) -> WeightTable:
        """Load the weights of a detector. The box head of a Faster R-CNN is also loaded into the features of objects
        and of union boxes.

        Returns:
            from which tensor each parameter was loaded. Raises BadInput if shapes differ.
        """
        if isinstance(self.detector, DetectorBelow):
            return self._load_below(weights, "detector.inner", {})
        head = "detector.roi_heads.box_head"
        return self._load_below(weights, "detector", {"box_features": head, "union.head": head})

    def forward(self, images: Tensor, sizes: Tensor, targets: Sequence[Mapping] | None = None) -> dict:
        """Return the head's outputs for sampled pairs (in training) or for all pairs, and the batch from which it
        computed them.

        Args:
            images: `(B, 3, H, W)` uint8, padded on the right and below.
            sizes: `(B, 2)` int64, height and width of each image without its padding.
            targets: with `boxes`, `labels`, `iscrowd`, `relations`; they can be left out only for sgdet in evaluation.

        Returns:
            `output`: RelationOutput, `batch`: RelationBatch, `truths`: the annotated graph of each image, on the host;
            `attribute_logits (N, attributes + 1)`, column 0 background, if there are attributes; `detector`: the input
            of the detector's own criterion, if the detector is trained too and targets are given.

        Raises:
            BadInput: boxes must be given, but there are no targets.
        """
        if targets is None and (self.given_boxes or self.training):
            raise BadInput(
                f"scene graphs in mode {self.mode} need given boxes; to detect boxes too, train and use a "
                "model with --model.mode sgdet"
            )
        maps, images_hw = self.detector.features(images, sizes, targets)
        graphs = None if targets is None else [annotated_graph(on_host(target)) for target in targets]
        truths = None if graphs is None else send_dicts(graphs, images.device)
        learns = self.joint and targets is not None
        detector_outputs = None
        if learns and not self.training:  # first: the proposals of its losses are those of its detections
            detector_outputs = self.detector.from_features(maps, images_hw, targets)
        if self.given_boxes:
            objects = given_objects(self, maps, images_hw, truths, graphs)
            boxes = [graph["boxes"] for graph in graphs]
            learned = {}
        else:
            objects, boxes, learned = detected_objects(self, maps, images_hw, truths, graphs, detector_outputs)
        batch = self._batch(objects, boxes, learned, graphs, sizes, targets or ())
        if self.reads_union:
            batch.union_features, batch.spatial_features = self.union(
                maps,
                batch.boxes_xyxy,
                batch.pairs,
                batch.num_pairs,
                sizes,
                images_hw,
                batch.on_host,
            )
        output = self.head(batch)
        outputs = {"output": output, "batch": batch, "truths": graphs}
        if self.attribute_predictor is not None:
            outputs["attribute_logits"] = self.attribute_predictor(batch.roi_features)
        # DDP waits for gradients of everything that the outputs depend on. A tensor without a loss, such as the
        # features of a batch without objects, must not be among them.
        batch.roi_features = batch.union_features = batch.spatial_features = output.context = None
        if learns:
            outputs["detector"] = detector_outputs or self.detector.from_features(maps, images_hw, targets)
        return outputs

    def _batch(
        self,
        objects: dict,
        boxes: list[Tensor],
        learned: dict[str, Tensor],
        graphs: list[dict] | None,
        sizes: Tensor,
        targets: Sequence[Mapping],
    ) -> RelationBatch:
        """Sample the pairs of the objects and return the head's input, without the features of unions.

        objects, boxes, learned: of `detected_objects`. graphs: annotated, on the host.
        """
        device = objects["boxes_xyxy"].device
        draws = [image_generator(target, "pairs") for target in targets]
        pairs = sampled_pairs(self, boxes, graphs, learned.get("labels"), draws)
        (sent,) = send_dicts([pairs | learned], device)
        return RelationBatch(
            sizes_hw=sizes,
            **objects,
            **sent,
            on_host=(torch.cat(boxes), pairs["pairs"]),
            draws=[image_generator(target, "labels", device) for target in targets],
        )

    def denominators(self, targets: Sequence[Mapping]) -> dict[str, float]:
        """Return the number of images in sgdet, and if boxes are given, the numbers that are known from the targets:
        pairs, objects, images with objects, and terms of the attribute loss (objects with attributes x columns of their
        logits). If the detector is trained, add its own denominators."""
        counts = {"images": float(len(targets))}
        if self.given_boxes:
            counts |= count_sampled_pairs(self, targets)
            counts["attribute_entries"] = counts["relation_named_objects"] * (len(self.attributes) + 1)
        if self.joint:
            counts |= self.detector.denominators(targets)
        return {name: counts[name] for name in self.denominator_names}

    def criterion(self, outputs: Mapping, targets: Sequence[Mapping], denominators: Mapping):
        """Return losses by name, and metrics as (sum, count).

        If boxes are given, a loss is a sum divided by the number of pairs (or objects, images, terms of the attribute
        loss) in `denominators`. In sgdet, where the pairs are not known beforehand, a loss is the sum of the means of
        each image, divided by denominators["images"].
        relation_error, object_error: per cent of related pairs, and of objects, whose best predicate or class is wrong.
        """
        output = outputs["output"]
        batch = outputs["batch"]
        weights = self.predicate_weights if self.rare_predicate_power or self.class_balanced_beta else None
        sums = head_losses(output, batch, self.label_smoothing, weights)
        if batch.attributes is not None and "attribute_logits" in outputs:
            sums["loss_refine_att"] = attribute_loss(
                outputs["attribute_logits"].float(), batch.attributes, batch.num_objects
            )
        losses = {}
        for name in self.relation_losses:
            if name in sums:  # others are of training only, or the batch has no objects
                of_images, counts = sums[name]
                total = of_images if self.given_boxes else mean_or_zero(of_images, counts)
                losses[name] = total.sum() / denominators[self.divided_by[name]]
        if "detector" in outputs:
            of_detector, _ = self.detector.criterion(outputs["detector"], targets, denominators)
            losses |= of_detector
        return losses, self._metrics(output, batch)

    def _metrics(self, output: RelationOutput, batch: RelationBatch) -> dict[str, tuple[Tensor, Tensor]]:
        related = batch.relation_labels > 0
        labelled = batch.labels > 0
        best_predicate = output.relation_logits[:, 1:].argmax(1) + 1
        wrong = related & (best_predicate != batch.relation_labels)
        metrics = {"relation_error": (100.0 * wrong.sum(), related.sum())}
        if self.mode != "predcls":
            best_class = output.object_logits[:, 1:].argmax(1) + 1
            wrong = labelled & (best_class != batch.labels)
            metrics["object_error"] = (100.0 * wrong.sum(), labelled.sum())
        return metrics

    def graph_obstacle(self) -> str | None:
        if self.given_boxes:
            return f"in {self.mode} the boxes are given"
        if self.options["head"] not in TRACEABLE_HEADS:
            return f"of the heads only {', '.join(TRACEABLE_HEADS)} can be traced"
        if not isinstance(self.detector, DetectorBelow):
            return "its detector has two stages, whose proposals vary"
        if self.options["union_levels"] == "all":
            return "union features of all levels cannot be traced"
        return None

    def decode_graph(self, images: Tensor, sizes: Tensor, top_k: int, pool: Callable) -> tuple[Tensor, ...]:
        return decode_graph(self, images, sizes, top_k, pool)

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

        score_threshold: if boxes are detected, objects with this score or less are left out, and so are their pairs.

        Returns:
            per image M objects, `boxes (M, 4)`, `scores (M,)`, `labels (M,)` from 0 (-1 if all classes were excluded,
            see `late_nms`), and P pairs of them, `pairs (P, 2)`, best first, `predicate_scores (P, predicates)`,
            `predicates (P,)` and `triplet_scores (P,)` of the `top_k` best pairs (recall at K <= top_k needs no others)
            and, if boxes are given, of all annotated pairs (accuracy needs them). If boxes are given, also `true_labels
            (M,)`, R relations, `true_relations (R, 3)`, and, for data with attributes, `true_attributes (M, A)` ids, at
            most A per object. `attribute_scores (M, attributes)` if the model predicts attributes, but not in sgdet
            with targets: no metric uses them there, and for 26,000 images they are 1.6 GB.
        """
        output = outputs["output"]
        if self.prior_adjustment:
            adjusted = output.relation_logits - self.prior_adjustment * log_prior(self.relation_counts)
            output = replace(output, relation_logits=adjusted)
        batch = outputs["batch"]
        truths = outputs["truths"]
        objects, triplets = rank_triplets(output, batch, self.given_boxes, self.nms_threshold)
        scale_hw = (orig_sizes / sizes).float()
        scale_xyxy = scale_hw.flip(1).repeat(1, 2)  # (B, 4)
        objects["boxes"] = objects["boxes"] * scale_xyxy[batch.image]
        if "attribute_logits" in outputs and (self.given_boxes or truths is None):
            scores = outputs["attribute_logits"].float().sigmoid()
            objects["attribute_scores"] = scores[:, 1:]
        annotated = [0] * len(batch.num_pairs)
        if self.given_boxes:
            annotated = [len(truth["relations"]) for truth in truths]
        short, counts = shortlist(triplets, batch.num_pairs, top_k, annotated)
        graphs = graphs_on_host(objects, short, batch.num_objects, counts)
        if not self.given_boxes:
            return [strong_only(graph, score_threshold) for graph in graphs]
        for graph, truth in zip(graphs, truths, strict=True):
            for name in ("labels", "relations", "attributes"):
                if name in truth:
                    graph[f"true_{name}"] = truth[name]
        return graphs


def _divisor(loss: str) -> str:
    """Return the denominator of a loss of a head on given boxes."""
    divisors = {
        "loss_refine_obj": "relation_objects",
        "loss_refine_att": "attribute_entries",
        "binary_loss": "relation_images",
        "l21_loss": "relation_images",
        "dist_loss2": "relation_images",
        "loss_mask_query": "relation_images",
        "loss_mask_e2e": "relation_images",
        "loss_mask_n2e": "relation_images",
    }
    return divisors.get(loss, "relation_pairs")


def _attribute_predictor(width: int, count: int) -> nn.Linear:
    """Build a layer with one logit per attribute, column 0 for background as in the ids; initialised like the published
    one."""
    predictor = nn.Linear(width, count + 1)
    nn.init.normal_(predictor.weight, std=0.01)
    nn.init.zeros_(predictor.bias)
    return predictor


def _detector_of(below: nn.Module) -> Detector:
    return below.inner if isinstance(below, DetectorBelow) else below


def _build_below(class_names: Sequence[str], o: SceneGraphOptions, joint: bool) -> nn.Module:
    with naming_its_options():
        inner = build_below(o, {}, class_names)
        if isinstance(inner, FasterRCNN):
            return inner
        return DetectorBelow(
            inner,
            o.map_channels,
            o.representation_size,
            score_threshold=o.score_threshold,
            nms_threshold=o.nms_threshold,
            passes_targets=joint,
        )


def _build_head(o: SceneGraphOptions, sizes: HeadSizes) -> nn.Module:
    log_frequency = torch.zeros(sizes.num_classes, sizes.num_classes, sizes.num_predicates)
    extra = {"separate_spatial": True} if o.separate_spatial else {}
    try:
        head = build_relation_head(o.head, o.mode, sizes, log_frequency, **o.head_options, **extra)
    except TypeError as error:
        raise BadInput(f"model.head_options {o.head_options} do not fit the head {o.head!r}: {error}") from error
    if o.head == "frequency":
        head.requires_grad_(True)  # the counts are the baseline; trained on, a table of its own
    for module in head.modules():  # labels that a head commits to are those of the graph
        if hasattr(module, "nms_threshold") and "nms_threshold" not in o.head_options:
            module.nms_threshold = o.nms_threshold
    return head


def _check_options(o: SceneGraphOptions, freeze: str, predicates: Sequence[str]) -> None:
    options = (
        ("mode", o.mode, GRAPH_MODES),
        ("head", o.head, RELATION_HEADS),
        ("freeze", freeze, GRAPH_FREEZE_CHOICES),
        ("union_levels", o.union_levels, ("one", "all")),
    )
    faults = []
    for key, value, choices in options:
        if value not in choices:
            faults.append(f"model.{key} is {value!r}; expected {', '.join(choices)}")
    if not 0 <= o.class_balanced_beta < 1 or o.class_balanced_beta and o.rare_predicate_power:
        expected = "0 to below 1, and 0 where model.rare_predicate_power is set"
        faults.append(f"model.class_balanced_beta is {o.class_balanced_beta}; expected {expected}")
    if o.pairs_per_relation < 1:
        faults.append(f"model.pairs_per_relation is {o.pairs_per_relation}; expected at least 1")
    if not 0 < o.match_iou <= 1:
        faults.append(f"model.match_iou is {o.match_iou}; expected above 0 to 1")
    if o.separate_spatial and o.head != "causal":
        faults.append(f"model.separate_spatial is for the head causal, not {o.head}")
    if not predicates:
        faults.append("the data names no predicates; scene graphs need data with relations")
    if faults:
        raise BadInput(faults)
