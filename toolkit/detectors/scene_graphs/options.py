"""The settings of scene graphs, with the values of Scene-Graph-Benchmark and of EGTR."""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from toolkit.base.number_types import (
    ClosedUnitInterval,
    MovingAverage,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    WidthInt,
)
from toolkit.models import DetectorOptions


@dataclass
class SceneGraphOptions(DetectorOptions):
    """A relation head on a detector (Tang et al.)."""

    inference_only: ClassVar[tuple[str, ...]] = (
        "head_options.effect", "prior_adjustment", "detections_per_image", "score_threshold", "nms_threshold",
        "require_overlap",
    )  # fmt: skip

    architecture: str = "scene_graph"
    """Detector: a name of this toolkit, or `module:Class` of your own; this one is a relation head on a detector."""
    mode: Literal["predcls", "sgcls", "sgdet"] = "predcls"
    """Task: predcls (boxes and classes are given), sgcls (boxes are given) or sgdet (only the image is given)."""
    head: Literal[
        "frequency", "imp", "motifs", "vctree", "transformer", "vtranse", "causal", "penet", "react", "react_pp",
        "squat",
    ] = "motifs"
    """Relation head, which predicts the predicates of object pairs; frequency is the counting baseline without
    training."""
    head_options: dict[str, Any] = field(default_factory=dict)
    """Settings of the relation head, such as {context: vctree, fusion: gate, effect: TDE} of causal."""
    detector: str | None = None
    """Trained detector to build on: run folder, checkpoint or `final/` of any detector script, or a file of published
    weights, such as `model_final.pth` of maskrcnn-benchmark and Scene-Graph-Benchmark. It is frozen unless
    `model.freeze` is none or norms. null: a Faster R-CNN with random weights."""
    detector_options: dict[str, Any] | None = None
    """Settings of the detector, by the names they have in its own script, `architecture` (default faster_rcnn) among
    them; null: those of `model.detector`, or the published ones."""
    backbone: str | None = None
    """timm backbone of the detector, overriding `model.detector_options` and `model.detector`; null: theirs."""
    freeze: Literal["detector", "norms", "detector_and_norms", "none"] | None = None
    """Parts to freeze: detector, norms (batch norms of the detector and of all that is built on it, and the moving
    prototypes of react_pp), detector_and_norms, or none. A trainable detector learns its feature maps only in predcls.
    null: detector if `model.detector` is given."""
    map_channels: WidthInt = 256
    """Number of channels that 1 x 1 convolutions project the detector's feature maps to before boxes are pooled; a
    Faster R-CNN has its own."""
    representation_size: WidthInt = 1024
    """Dimension of object and pair features on a detector other than Faster R-CNN, which has its own."""
    hidden_dim: WidthInt = 512
    """Hidden dimension of the relation head."""
    embed_dim: WidthInt = 200
    """Dimension of the class embeddings."""
    word_vectors: str | None = None
    """Text file of word vectors, such as glove.6B.200d.txt, to initialise the class embeddings; null: random
    initialisation."""
    union_levels: Literal["one", "all"] = "one"
    """Pyramid levels that union boxes are pooled from: one (the level that fits the box size) or all (joined by a 3 x 3
    convolution, as in Scene-Graph-Benchmark)."""
    separate_spatial: bool = False
    """Keep the spatial features of a pair separate from the visual features of its union box; the head causal then
    multiplies its context with them."""
    whole_pixels: bool = False
    """Boxes of data and graphs end at their last pixel, as Scene-Graph-Benchmark takes those of Visual Genome; the
    detector below is given boxes one pixel longer."""
    pairs_per_image: PositiveInt = 1024
    """Number of object pairs sampled per image in training."""
    positive_fraction: ClosedUnitInterval = 0.25
    """Maximum fraction of pairs with a relation among the sampled pairs."""
    pairs_per_relation: PositiveInt = 4
    """sgdet: maximum number of detection pairs sampled per annotated relation in training."""
    match_iou: ClosedUnitInterval = 0.5
    """sgdet: minimum IoU with an annotated object for a detection to stand for it in training."""
    add_annotated_boxes: bool = True
    """sgdet: add the annotated boxes to the detector's proposals in training."""
    require_overlap: bool = False
    """sgdet: consider only pairs of overlapping boxes, in training and evaluation."""
    detections_per_image: PositiveInt = 80
    """sgdet: maximum number of detected objects per image."""
    score_threshold: ClosedUnitInterval = 0.05
    """sgdet: minimum score of a detection; a Faster R-CNN has its own in `model.detector_options`."""
    nms_threshold: ClosedUnitInterval = 0.5
    """sgdet: IoU from which two objects of an image cannot have the same class."""
    label_smoothing: ClosedUnitInterval = 0.0
    """Label smoothing of predicates and classes: probability mass that is spread evenly over all of them."""
    rare_predicate_power: NonNegativeFloat = 0.0
    """Exponent p of the predicate weights (largest count / count) ** p in the relation loss, which make rare predicates
    count more; 0 weighs all equally."""
    class_balanced_beta: MovingAverage = 0.0
    """Class-balanced predicate weights (Cui et al., 2019): 1 / effective number with this beta, such as 0.999; 0
    disables it. Not together with `model.rare_predicate_power`."""
    prior_adjustment: NonNegativeFloat = 0.0
    """Logit adjustment at inference (Menon et al., 2021): factor of the log-frequency of a predicate in the training
    data that is subtracted from its logit. 1 makes rare predicates as likely as frequent ones; 0 disables it."""
    norm_momentum: ClosedUnitInterval | None = None
    """BatchNorm momentum of head and union features; short runs need 0.1. null: the published 0.001 and 0.01, whose
    running statistics take tens of thousands of steps."""


@dataclass
class EgtrOptions(DetectorOptions):
    """EGTR, in one stage: a relation head on a DETR's decoder (Im et al.)."""

    inference_only: ClassVar[tuple[str, ...]] = ("prior_adjustment",)

    architecture: str = "egtr"
    detector: str | None = None
    """Trained DETR to build on: run folder, checkpoint or `final/` of a deformable_detr, rt_detr_v2, d_fine, deimv2 or
    ecdet; null: one of these with random weights."""
    detector_options: dict[str, Any] | None = None
    """Settings of the DETR, by the names they have in its own script, `architecture` among them; null: those of
    `model.detector`, or a Deformable DETR with 200 queries."""
    backbone: str | None = None
    """timm backbone of the DETR, overriding `model.detector_options` and `model.detector`; null: theirs."""
    freeze: Literal["detector", "norms", "none"] = "none"
    """Parts to freeze: detector (the DETR), norms (its batch norms) or none."""
    frequency_bias: bool = True
    """Initialise predicate logits from the frequency of each predicate between two classes in the training data."""
    smoothing: ClosedUnitInterval = 1e-14
    """Adaptive smoothing, between 0 and 1: by how much less than 1 a perfect detection counts. The target probability
    of a relation is the product of the quality of its two detections; the larger the value, the less an inaccurate
    detection counts."""
    unrelated_per_relation: NonNegativeInt = 80
    """Negative sampling: number of wrong predicates between objects in the loss, per annotated relation of an image."""
    unmatched_per_relation: NonNegativeInt = 80
    """Negative sampling: number of predicates of unmatched queries in the loss, per annotated relation of an image."""
    hardest_unrelated: bool = True
    """Hard negative mining: sample the most likely wrong predicates between objects, instead of random ones."""
    hardest_unmatched: bool = True
    """Hard negative mining: sample the most likely predicates of unmatched queries, instead of random ones."""
    prior_adjustment: NonNegativeFloat = 0.0
    """Logit adjustment at inference (Menon et al., 2021): factor of the log-frequency of a predicate in the training
    data that is subtracted from its logit. 1 makes rare predicates as likely as frequent ones; 0 disables it."""


GraphOptions = SceneGraphOptions | EgtrOptions


def without_detector(options: GraphOptions, data_path: str | None) -> str:
    """Return a sentence with the two commands that train a model to detect objects on these data. It is "" for a model
    with a trained detector, and if `data_path` is None, as for the bundled data."""
    if options.detector or options.pretrained or not data_path:
        return ""
    about = "this run begins with a detector of random weights. To begin with a trained one"
    data = f"--data.path {data_path}"
    first = "faster_rcnn.py --config configs/faster_rcnn/own_data.yaml"
    second = "own_data.yaml --model.mode sgdet"
    if isinstance(options, EgtrOptions):
        first = "detr.py --config configs/detr/shapes.yaml"
        second = "shapes_egtr.yaml"
    elif options.mode == "predcls":
        about = "this run predicts relations between the annotated boxes, and detects no objects. To detect them too"
    first = f"`accelerate launch scripts/train_{first} {data} --run.name detector`"
    second = f"`accelerate launch scripts/train_sgg.py --config configs/sgg/{second} {data}"
    chosen = "--model.detector runs/detector --model.detector_options null"
    return f"{about}: first {first}, then {second} {chosen}`"
