"""The settings of scene graphs, with the values of Scene-Graph-Benchmark and of EGTR."""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from toolkit.models.options import DetectorOptions


@dataclass
class SceneGraphOptions(DetectorOptions):
    """A relation head on a detector (Tang et al.)."""

    inference_only: ClassVar[tuple[str, ...]] = (
        "head_options.effect", "prior_adjustment", "detections_per_image", "score_threshold", "nms_threshold",
        "require_overlap",
    )  # fmt: skip

    architecture: str = "scene_graph"
    """Name of a detector of this toolkit, or `module:Class` of your own; this one is a relation head on a
    detector."""
    mode: Literal["predcls", "sgcls", "sgdet"] = "predcls"
    """What is given beside the image: boxes and their classes (predcls), boxes (sgcls), or nothing (sgdet)."""
    head: Literal["frequency", "imp", "motifs", "vctree", "transformer", "vtranse", "causal", "penet", "react"] = (
        "motifs"
    )
    """What tells the predicates of pairs of objects; frequency is the baseline that only counts."""
    head_options: dict[str, Any] = field(default_factory=dict)
    """Settings of the head itself, such as {context: vctree, fusion: gate, effect: TDE} of causal."""
    detector: str | None = None
    """Run folder, checkpoint or `final/` of a trained detector of any script to start from, or a file of published
    weights, such as `model_final.pth` of maskrcnn-benchmark and Scene-Graph-Benchmark; it stays as it is unless
    `model.freeze` is none or norms. Without a value a Faster R-CNN starts from random weights."""
    detector_options: dict[str, Any] | None = None
    """Settings of the detector, as it has them by itself; without a value those of `model.detector`, or the published
    ones. `architecture` among them is faster_rcnn, or that of another detector, such as yolov3 or rt_detr_v2."""
    backbone: str | None = None
    """timm model of the detector, in place of that in `model.detector_options`; without a value the one of these or
    of `model.detector`."""
    freeze: Literal["detector", "norms", "detector_and_norms", "none"] | None = None
    """What is not trained: the detector (detector), the batch norms of the detector and of all that is built on it
    (norms), both (detector_and_norms), or nothing (none). A detector that is trained learns its feature maps only in
    predcls. Without a value the detector stays as it is if `model.detector` is given."""
    map_channels: int = 256
    """Width that 1 x 1 convolutions bring the feature maps of a detector to before boxes are pooled from them; a Faster
    R-CNN has a width of its own."""
    representation_size: int = 1024
    """Width of the features of objects and pairs on a detector other than Faster R-CNN, which has its own."""
    hidden_dim: int = 512
    """Width of the head."""
    embed_dim: int = 200
    """Width of the class vectors."""
    word_vectors: str | None = None
    """Text file of word vectors, such as glove.6B.200d.txt, that the class vectors start from; without a value they are
    random."""
    union_levels: Literal["one", "all"] = "one"
    """Levels of the pyramid that union boxes are pooled from: the one that suits the box, or all, joined by a 3 x 3
    convolution, as Scene-Graph-Benchmark has it."""
    separate_spatial: bool = False
    """Keep where two boxes are apart from what is in their union: with the head causal, whose context it then
    multiplies."""
    pairs_per_image: int = 1024
    """Pairs of objects of an image that are sampled in training."""
    positive_fraction: float = 0.25
    """Largest share of the sampled pairs that may have a relation."""
    pairs_per_relation: int = 4
    """In sgdet, largest number of pairs of detections that are sampled in training for one annotated relation."""
    match_iou: float = 0.5
    """In sgdet, IoU with an annotated object from which a detection stands for it in training."""
    add_annotated_boxes: bool = True
    """In sgdet, give the detector the annotated boxes in training, beside those that it proposes."""
    require_overlap: bool = False
    """In sgdet, look at pairs of overlapping boxes only, in training and in evaluation."""
    detections_per_image: int = 80
    """In sgdet, largest number of detected objects of an image."""
    score_threshold: float = 0.05
    """In sgdet, detections need a score above this; a Faster R-CNN has its own in `model.detector_options`."""
    nms_threshold: float = 0.5
    """In sgdet, IoU from which two objects of an image cannot have the same class."""
    label_smoothing: float = 0.0
    """Share of the probability that the targets of predicates and of classes spread evenly over all of them."""
    rare_predicate_power: float = 0.0
    """Exponent p of the weight (most frequent / count) ** p that a predicate has in its loss; at 0 all weigh the
    same."""
    class_balanced_beta: float = 0.0
    """Weigh predicates in their loss by 1 / effective number, with this beta, such as 0.999 (Cui et al., 2019); 0: not,
    and not beside `model.rare_predicate_power`."""
    prior_adjustment: float = 0.0
    """Times the logarithm of a predicate's share of the training relations, taken from its logit when graphs are
    predicted (Menon et al., 2021); 1 makes rare predicates as likely as frequent ones, 0 changes nothing."""
    norm_momentum: float | None = None
    """Momentum of the batch norms of head and union features. Without a value they have the published ones, 0.001 and
    0.01, whose running statistics take tens of thousands of steps; short runs need 0.1."""


@dataclass
class EgtrOptions(DetectorOptions):
    """EGTR, in one stage: a relation head on a DETR's decoder (Im et al.)."""

    inference_only: ClassVar[tuple[str, ...]] = ("prior_adjustment",)

    architecture: str = "egtr"
    detector: str | None = None
    """Run folder, checkpoint or `final/` of a trained DETR to start from: deformable_detr, rt_detr_v2, d_fine or
    deimv2. Without a value one of these starts from random weights."""
    detector_options: dict[str, Any] | None = None
    """Settings of the DETR, as it has them by itself, `architecture` among them; without a value those of
    `model.detector`, or a Deformable DETR with 200 queries."""
    backbone: str | None = None
    """timm model of the DETR, in place of that in `model.detector_options`; without a value the one of these or of
    `model.detector`."""
    freeze: Literal["detector", "norms", "none"] = "none"
    """What is not trained: the DETR (detector), its batch norms (norms), or nothing (none)."""
    frequency_bias: bool = True
    """Begin from how often training has each predicate between two classes."""
    smoothing: float = 1e-14
    """By how much less than 1 a perfect detection counts, between 0 and 1: the wanted probability of a relation is the
    product of what its two detections count. The larger, the less does one count that is off."""
    unrelated_per_relation: int = 80
    """Wrong predicates between objects that the loss counts for each annotated relation of an image."""
    unmatched_per_relation: int = 80
    """Predicates of queries without an object that the loss counts for each annotated relation of an image."""
    hardest_unrelated: bool = True
    """Count the wrong predicates that are likeliest, instead of random ones."""
    hardest_unmatched: bool = True
    """Count the predicates of queries without an object that are likeliest, instead of random ones."""
    prior_adjustment: float = 0.0
    """Times the logarithm of a predicate's share of the training relations, taken from its logit when graphs are
    predicted (Menon et al., 2021); 1 makes rare predicates as likely as frequent ones, 0 changes nothing."""


GraphOptions = SceneGraphOptions | EgtrOptions
