"""Settings of scene graphs: what `toolkit.runs.settings` has for every detector, and what they add to it."""

from dataclasses import dataclass
from typing import Literal

from jsonargparse.typing import NonNegativeFloat, NonNegativeInt, PositiveInt

from toolkit.runs.settings import EvalConfig, OptimConfig, PretrainedConfig, ScheduleConfig


@dataclass
class RelationConfig(PretrainedConfig):
    """The head, the pairs it is trained on and its losses, with the published values for keys that are not given."""

    hidden_dim: int | None = None
    """Width of the head."""
    embed_dim: int | None = None
    """Width of the class vectors."""
    word_vectors: str | None = None
    """Text file of word vectors (glove.6B.200d.txt) that the class vectors start from; none given: random ones."""
    pairs_per_image: int | None = None
    """Pairs of an image that training samples."""
    positive_fraction: float | None = None
    """Share of these that may have a relation."""
    require_overlap: bool | None = None
    """sgdet: pairs of overlapping boxes only."""
    detections_per_image: int | None = None
    """sgdet: objects of an image at most."""
    nms_threshold: float | None = None
    """sgdet: IoU at which two objects cannot have the same class."""
    label_smoothing: float | None = None
    """Of the predicates and classes."""
    rare_predicate_power: float | None = None
    """Weight (most frequent / count) ** power of a predicate in its loss; 0: all alike."""
    norm_momentum: float | None = None
    """Of the batch norms of the head; the published ones are for tens of thousands of steps, short runs need 0.1."""


@dataclass
class GraphOptimConfig(OptimConfig):
    """The optimizer step. Slow heads: `lr_multipliers`, such as {box_features: 0.1, union.head: 0.1}."""

    scale_lr_by_images: bool = False
    """Multiply all learning rates by the images of an optimizer step over all processes, as the original does."""
    gradient_table_every: NonNegativeInt = 0
    """Optimizer steps between two tables of the largest gradients; 0: never."""


@dataclass
class GraphScheduleConfig(ScheduleConfig):
    """The learning rate as a function of the optimizer step, or of the validation."""

    name: Literal["plateau", "constant", "step", "multistep", "cosine", "poly", "linear"] = "plateau"
    """Shape after the warm-up. plateau: times `gamma` when `eval.metric_for_best` stops improving."""
    plateau_patience: PositiveInt = 2
    """plateau: validations in a row without improvement before the rate falls."""
    plateau_threshold: NonNegativeFloat = 1e-3
    """plateau: what a validation must exceed the best by to be an improvement."""
    plateau_cooldown: NonNegativeInt = 0
    """plateau: validations after a fall that cannot count as bad."""
    max_decays: PositiveInt = 3
    """plateau: training ends when the rate has fallen so many times."""


@dataclass
class GraphEvalConfig(EvalConfig):
    """Evaluation."""

    metric_for_best: str = "R@100"
    """Metric that `best`, early stopping and the plateau schedule go by."""
    protocol: Literal["original", "strict"] = "original"
    """original: as published, without images in which no pair is predicted, and with 0 in mR for predicates that the
    data have not; strict: the images count 0, the predicates not at all."""
    zero_shot: str | None = None
    """List of triplets for zR@K (CSV or zeroshot_triplet.pytorch); none given: those that training data lack."""
    before_training: bool = False
    """Evaluate before the first step too."""
