"""Shared parts of scene graph detectors: names, training statistics, and the detector that they are built on."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from toolkit.base.errors import BadInput
from toolkit.data.table import DetectionTable
from toolkit.detectors.scene_graphs.evaluator import RECALL_AT, SceneGraphEvaluator
from toolkit.detectors.scene_graphs.options import GraphOptions
from toolkit.detectors.scene_graphs.triplet_matches import compact_graph
from toolkit.detectors.scene_graphs.true_graphs import load_triplets, zero_shot_triplets
from toolkit.models import DetectorOptions, build_detector
from toolkit.models.detector import Detector, denominator_of
from toolkit.models.weights.mapping import WeightTable, map_weights


class GraphDetector(Detector):
    """The base of detectors whose detections have a scene graph. It is built on another detector, `self.detector`.

    Announced in addition to the attributes of `Detector`:
        mode: predcls, sgcls or sgdet. predicates, attributes: names, in the order of their labels.
        counts_pairs_apart: the training counts include relations between boxes that do not share area.
    """

    mode = "sgdet"
    predicates: Sequence[str] = ()
    attributes: Sequence[str] = ()
    counts_pairs_apart = False

    def _make_counts(self, num_classes: int, num_predicates: int) -> None:
        """Register buffers for the counts of `learn_counts`; they are saved with the weights."""
        classes = num_classes + 1
        size = num_predicates + 1
        self.register_buffer(
            "relation_counts",
            torch.zeros(classes, classes, size, dtype=torch.int64),
        )
        self.register_buffer("candidate_counts", torch.zeros(classes, classes, dtype=torch.int64))
        self.register_buffer(
            "seen_triplets",
            torch.zeros(num_classes, num_classes, num_predicates, dtype=torch.bool),
        )

    @torch.no_grad()
    def learn_counts(self, relations: np.ndarray, candidates: np.ndarray, seen: np.ndarray) -> None:
        """Store the counts of the training split in buffers, which are saved with the weights.

        Args:
            relations, candidates: results of `count_predicates`, (C, C, P) and (C, C), for C classes and P predicates
                with background.
            seen: (C - 1, C - 1, P - 1) bool, the triplets of the training split, including those between boxes that do
                not overlap.
        """
        self.relation_counts.copy_(torch.from_numpy(relations))
        self.candidate_counts.copy_(torch.from_numpy(candidates))
        self.seen_triplets.copy_(torch.from_numpy(seen))

    def make_evaluator(
        self,
        table: DetectionTable,
        backend: str,
        protocol: str = "original",
        zero_shot: str | Path | None = None,
        phrase_detection: bool = False,
    ) -> SceneGraphEvaluator:
        """Build the evaluator of R@K and related metrics on a table.

        backend, protocol, phrase_detection: see `SceneGraphEvaluator`. zero_shot: file of triplets for zR@K, see
        `load_triplets`; None: the triplets of the table that the training data did not have.

        Raises:
            BadInput: the table has other predicates or attributes than the detector (a table without attributes is
                accepted); the file is not a list of triplets, or numbers classes that `data.classes` changes.
        """
        _check_same_names(self, table)
        if zero_shot and table.class_map:
            raise BadInput(
                f"eval.zero_shot {zero_shot}: the file numbers the classes of the data, which data.classes changes; "
                "leave eval.zero_shot out: the triplets that do not occur in the training data are then taken"
            )
        if zero_shot:
            triplets = load_triplets(zero_shot)
        else:
            triplets = zero_shot_triplets(self.seen_triplets.cpu().numpy(), table)
        by_predicate = self.relation_counts.sum((0, 1))[1:]  # without background
        return SceneGraphEvaluator(
            table,
            self.mode,
            zero_shot=triplets,
            protocol=protocol,
            backend=backend,
            phrase_detection=phrase_detection,
            trained_relations=by_predicate.cpu().numpy(),
        )

    def graph_obstacle(self) -> str | None:
        """Return the reason why `decode_graph` cannot be used, as a text; None if it can."""
        return None

    def decode_graph(self, images: Tensor, sizes: Tensor, top_k: int, pool: Callable) -> tuple[Tensor, ...]:
        """Return the outputs of `PixelsToGraph` in `toolkit.tools.export.relations`, with the same number of rows for
        every image, as exporters need.

        images, sizes: as in `forward`. top_k: number of relations of an image. pool: replacement of RoI pooling for
        exporters, `toolkit.tools.export.faster_rcnn.pool_where`.
        """
        raise NotImplementedError

    def to_keep(self, prediction: Mapping) -> dict:
        """Return the compact form of an image's graph that an evaluation keeps, without the scores of all predicates of
        all pairs: for VG150's test images, these alone are 530 MB."""
        compact = compact_graph(prediction, RECALL_AT[-1])
        return {name: torch.as_tensor(value) for name, value in compact.items()}

    def _load_below(self, weights: Mapping[str, Tensor], below: str, prefixes: Mapping[str, str]) -> WeightTable:
        """Load a detector's weights into the modules below the prefix `below`, and into more of them by `prefixes`."""
        source = {f"{below}.{name}": value for name, value in weights.items()}
        current = {name: value for name, value in self.state_dict().items() if not name.startswith("head.")}
        mapped = map_weights(current, source, prefixes)
        self.load_state_dict(mapped.state, strict=False)
        mapped.new += [name for name in self.state_dict() if name.startswith("head.")]
        return mapped

    def _build_on(self, below: nn.Module) -> None:
        """Set `self.detector` to the detector `below`, and copy its requirements on images."""
        self.detector = below
        self.mean = below.mean
        self.std = below.std
        self.stride = below.stride
        self.fixed_size = below.fixed_size

    def _below_announces(self) -> None:
        """Add the losses of the detector below, which is trained too, to those that are announced."""
        self.loss_names += tuple(self.detector.loss_names)
        self.divided_by |= {name: denominator_of(self.detector, name) for name in self.detector.loss_names}
        self.default_weights = {**self.default_weights, **self.detector.default_weights}

    def resolved_options(self) -> dict:
        """Return the settings. Those that describe the detector below have the values in use."""
        inner = self.detector.resolved_options()
        about_starting = {option.name for option in fields(DetectorOptions)} - {"architecture"}
        return {
            **super().resolved_options(),
            "predicates": list(self.options.get("predicates", ())),
            "attributes": list(self.options.get("attributes", ())),
            "detector_options": {key: value for key, value in inner.items() if key not in about_starting},
            "backbone": inner.get("backbone"),
        }


def build_below(options: GraphOptions, default: Mapping, class_names: Sequence[str]) -> Detector:
    """Build the detector that the settings describe. default: settings of the detector if `options.detector_options` is
    not set. Its architecture, if none is given, is faster_rcnn.

    Raises BadInput if the detector would predict masks, or as `build_detector` does.
    """
    chosen = {"architecture": "faster_rcnn", **(options.detector_options or default)}
    chosen["pretrained_backbone"] = options.pretrained_backbone
    if options.backbone is not None:
        chosen["backbone"] = options.backbone
    if chosen.get("masks"):
        raise BadInput("masks: scene graphs do not use masks; set it to false")
    return build_detector(**chosen, class_names=class_names)


@contextmanager
def naming_its_options() -> Iterator[None]:
    """Return a context that turns each BadInput of the detector below into one that names `model.detector_options`."""
    try:
        yield
    except BadInput as error:
        raise BadInput([f"model.detector_options: {problem}" for problem in error.problems]) from error


def check_joined(table: DetectionTable, setting: str) -> None:
    """Raise BadInput if `table` joins several data sets with different predicates, in which case it has no relations.

    setting: name of the setting that chose these data sets, for the message.
    """
    if len(table.sets) > 1 and not table.predicates:
        raise BadInput(
            f"{setting}: {table.name} are several data sets that do not all list the same predicates, so that their "
            "relations cannot be joined: list the same predicates in all of them, or give scene graphs one data set, "
            "and measure the others with `python scripts/evaluate.py RUN --split FILE`"
        )


def _check_same_names(detector: GraphDetector, table: DetectionTable) -> None:
    check_joined(table, "data.val")
    compared = [("predicates", table.predicates, detector.predicates)]
    if table.attributes and detector.attributes:
        compared.append(("attributes", table.attributes, detector.attributes))
    faults = [
        f"{table.name} has the {what} {list(given)}, training data {list(expected)}: give both the same ones in the "
        "same order"
        for what, given, expected in compared
        if tuple(given) != tuple(expected)
    ]
    if faults:
        raise BadInput(faults)
