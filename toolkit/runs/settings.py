"""Settings shared by the five scripts, one dataclass per topic, and the parser of `--config FILE --group.key value`.

Every default stands here or in a script's own `ModelConfig`, nowhere else; a YAML file states only what differs.
"""

from dataclasses import dataclass, field
from typing import Literal

from jsonargparse import set_parsing_settings
from jsonargparse.typing import ClosedUnitInterval, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

set_parsing_settings(docstring_parse_attribute_docstrings=True)


@dataclass
class RunConfig:
    """The run: where it writes, how long it goes, when it logs, evaluates, saves and stops."""

    output_dir: str = "runs"
    """Folder that holds the run folders."""
    name: str = "run"
    """Name of this run's folder."""
    seed: int = 0
    """Seed of the weights, the data order, the augmentation and dropout."""
    epochs: PositiveInt = 10
    """Passes over the training data."""
    max_steps: PositiveInt | None = None
    """Optimizer steps after which training ends, if that is sooner than `epochs`."""
    max_minutes: PositiveFloat | None = None
    """Minutes of training (evaluation and saving not counted); turned once into a number of steps, from the measured
    speed of the first ones."""
    log_every: PositiveInt = 10
    """Optimizer steps between two rows of metrics.jsonl."""
    eval_every: int | str = "1 epoch"
    """Optimizer steps, or "N epochs", between two evaluations; 0: only at the end."""
    save_every: int | str = "1 epoch"
    """Optimizer steps, or "N epochs", between two checkpoints; 0: only at the end."""
    keep: PositiveInt = 2
    """Newest checkpoints kept, beside `best`."""
    resume: str = "never"
    """never | latest | PATH of a checkpoint or run folder."""
    resume_schedule: Literal["saved", "new"] = "saved"
    """On resume, go by the learning-rate schedule (and length) of the checkpoint, or by that of this command."""
    tracker: str = "none"
    """none | wandb | tensorboard | another tracker that Accelerate knows."""
    project: str = "detection-toolkit"
    """Project name given to the tracker."""
    on_nonfinite: Literal["stop", "skip", "rollback"] = "stop"
    """What the guard does when a loss, gradient or buffer is NaN or infinite, always before the update."""
    max_skips: NonNegativeInt = 10
    """Windows skipped one after the other before the guard stops the run."""
    max_rollbacks: NonNegativeInt = 3
    """Rollbacks before the guard stops the run."""
    rollback_lr_factor: PositiveFloat = 1.0
    """Factor on every learning rate after a rollback."""
    precision: Literal["no", "fp16", "bf16"] | None = None
    """Autocast precision; none given: what `accelerate launch` was told. The criterion is always float32."""
    deterministic: bool = False
    """Deterministic algorithms; operations that have none are named once in a warning."""
    threads: PositiveInt | None = None
    """CPU threads of one process; none given: as OMP_NUM_THREADS says, but all cores, shared among the processes, under
    `accelerate launch`, which sets it to 1 without a GPU."""
    probe_memory: bool = False
    """Before step 0, run the largest batch and one evaluation batch, so that memory runs out now or never."""
    eval_only: bool = False
    """Evaluate the weights (of `resume`) and stop."""


@dataclass
class DataConfig:
    """The data, and how images become batches."""

    train: str = "train"
    """Annotation file, folder, or name of a split."""
    val: str = "val"
    """Annotation file, folder, or name of a split."""
    image_dir: str | None = None
    """Folder of the images; none given: looked for beside the annotation file."""
    format: Literal["auto", "shapes", "coco", "hub", "visual_genome", "psg"] = "auto"
    """How to read `train` and `val`; shapes is the bundled data."""
    name: str | None = None
    """Hub name or local folder of a `datasets` dataset, folder of the Visual Genome files, or psg.json; `train` and
    `val` are then its splits."""
    workers: NonNegativeInt = 2
    """Loader processes per device."""
    batch_size_per_device: PositiveInt = 16
    """Images of one micro-batch on one device."""
    image_size: PositiveInt = 128
    """Side in pixels of the square that images are resized to, where `scales` is empty."""
    scales: list[int] = field(default_factory=list)
    """Lengths in pixels of the shorter side, one drawn for each training image, the last one in evaluation; more than
    one: with DETR's random crop; empty: `image_size`."""
    max_size: PositiveInt = 1333
    """Longest side in pixels, with `scales`."""
    flip: bool = True
    """Flip half of the training images left to right."""
    photometric: bool = False
    """Vary brightness, contrast, saturation and hue of training images."""
    group_by_aspect_ratio: bool = False
    """Batches of either wide or tall images."""
    cache_images: bool = False
    """Keep decoded images in memory; for small datasets."""
    on_error: Literal["raise", "drop"] = "raise"
    """Stop at faulty records, naming all, or leave them out, listing them in the run folder."""
    max_train_images: PositiveInt | None = None
    """Use only the first images of the training data."""
    overfit_batches: PositiveInt | None = None
    """Train on the first K batches only, unaugmented, and evaluate on them: a sound model learns them by heart."""


@dataclass
class PretrainedConfig:
    """The weights that a detector starts from, and those that stay as they are; base of the scripts' `ModelConfig`."""

    pretrained: str | None = None
    """Trained weights to start from: hub name, transformers folder, `final/`, run folder or checkpoint. Settings of the
    model that are not given are then the source's; rows of classes of the same name are kept. A resumed run has its
    own."""
    pretrained_backbone: bool | str = False
    """timm's weights for the backbone (downloaded once), or a file of them; not used with `pretrained`."""
    freeze_prefixes: list[str] = field(default_factory=list)
    """Modules or parameters that are not trained, by name or prefix of it; frozen modules stay in evaluation mode."""


@dataclass
class SsdConfig(PretrainedConfig):
    """Anchors of an SSD, what they are to find, its loss and its detections; CVNets' values for keys not given."""

    aspect_ratios: list[list[float]] | None = None
    """Of each level's anchors, beside two squares; each counts as width to height and height to width."""
    min_scale: float | None = None
    """Side of the finest level's anchors as a fraction of the image's."""
    max_scale: float | None = None
    """Side that the anchors of a further level would have."""
    iou_threshold: float | None = None
    """Overlap from which an anchor is to find a box."""
    negatives_per_positive: int | None = None
    """Hardest negative anchors of an image that count, per positive one."""
    label_smoothing: float | None = None
    """In the loss of classes."""
    self_weighting_steps: int | None = None
    """Optimizer steps over which the loss of boxes is brought to weigh as much as that of classes; 0: none."""
    self_weighting_every: int | None = None
    """Optimizer steps between two adjustments of its weight."""
    min_score: float | None = None
    """Detections need a probability above it."""
    nms_iou: float | None = None
    """A detection that overlaps a better one of its class by more goes."""


@dataclass
class TwoStageConfig(PretrainedConfig):
    """The two stages of a Faster R-CNN, under torchvision's names and with its values for keys that are not given."""

    rpn_pre_nms_top_n_train: int | None = None
    """Anchors per level that become candidates for proposals, in training."""
    rpn_pre_nms_top_n_test: int | None = None
    """The same in evaluation."""
    rpn_post_nms_top_n_train: int | None = None
    """Proposals per image, in training."""
    rpn_post_nms_top_n_test: int | None = None
    """Proposals per image, in evaluation."""
    rpn_nms_thresh: float | None = None
    """IoU from which a better proposal suppresses another."""
    rpn_fg_iou_thresh: float | None = None
    """IoU from which an anchor is to find an object."""
    rpn_bg_iou_thresh: float | None = None
    """IoU below which an anchor is background."""
    rpn_batch_size_per_image: int | None = None
    """Anchors per image that are trained."""
    rpn_positive_fraction: float | None = None
    """Share of them with objects, at most."""
    rpn_score_thresh: float | None = None
    """Proposals below this objectness are left out."""
    box_score_thresh: float | None = None
    """Detections below this score are left out."""
    box_nms_thresh: float | None = None
    """IoU from which a better detection of the class suppresses another."""
    box_detections_per_img: int | None = None
    """Detections per image at most."""
    box_fg_iou_thresh: float | None = None
    """IoU from which a proposal is to be classified as its object."""
    box_bg_iou_thresh: float | None = None
    """IoU below which a proposal is background."""
    box_batch_size_per_image: int | None = None
    """Proposals per image that are trained."""
    box_positive_fraction: float | None = None
    """Share of them with objects, at most."""


@dataclass
class OptimConfig:
    """The optimizer step."""

    name: Literal["adamw", "adam", "sgd"] = "adamw"
    """Update rule."""
    lr: NonNegativeFloat = 1e-4
    """Learning rate of everything but the backbone."""
    backbone_lr: NonNegativeFloat | None = None
    """Learning rate of the backbone; none given: `lr`."""
    weight_decay: NonNegativeFloat = 1e-4
    """Weight decay."""
    no_weight_decay_on_norm_and_bias: bool = False
    """No weight decay on norm layers and biases."""
    lr_multipliers: dict[str, float] = field(default_factory=dict)
    """Factor on the learning rate by prefix of the parameter name."""
    layer_decay: PositiveFloat = 1.0
    """Factor on the learning rate from each layer of the timm backbone to the one before it."""
    momentum: NonNegativeFloat = 0.9
    """Momentum of SGD."""
    max_norm: NonNegativeFloat = 0.1
    """Total gradient norm that gradients are clipped to; 0: no clipping."""
    accumulation_steps: PositiveInt = 1
    """Micro-batches of one optimizer step."""
    ema_decay: ClosedUnitInterval = 0.0
    """Decay of the moving average of the weights; 0: none."""
    compile: bool | str = False
    """torch.compile the model; a name: with that backend."""


@dataclass
class ScheduleConfig:
    """The learning rate as a function of the optimizer step."""

    name: Literal["constant", "step", "multistep", "cosine", "poly", "linear"] = "constant"
    """Shape after the warm-up."""
    warmup_steps: NonNegativeInt = 0
    """Steps over which the rate rises linearly."""
    warmup_factor: NonNegativeFloat = 0.001
    """Factor on the rate at the first step of the warm-up."""
    milestones: list[int | str] = field(default_factory=list)
    """multistep: steps, or "N epochs", after which the rate is multiplied by `gamma`."""
    step_size: int | str = "200 epochs"
    """step: period of the decay."""
    gamma: PositiveFloat = 0.1
    """Factor of step and multistep."""
    power: PositiveFloat = 0.9
    """Exponent of poly."""
    final_factor: NonNegativeFloat = 0.0
    """Factor on the rate that cosine, poly and linear end at."""


@dataclass
class CyclicScheduleConfig(ScheduleConfig):
    """The learning rate as a function of the optimizer step, warm restarts included."""

    name: Literal["constant", "step", "multistep", "cosine", "poly", "linear", "cyclic"] = "constant"
    """Shape after the warm-up."""
    stairs: PositiveInt = 5
    """cyclic: stairs of one cycle, each of `step_size`; the lowest rate is 1 / stairs of the highest."""
    cycles: PositiveInt = 10
    """cyclic: cycles before the last decay, to `final_factor`."""
    last_cycle: Literal["linear", "cosine"] = "linear"
    """cyclic: shape of the last decay."""


@dataclass
class LossConfig:
    """The weights of the losses and what they are divided by."""

    weights: dict[str, float | str | list] = field(default_factory=dict)
    """By announced name: a number, "learned", or [[step, value], ...]; names not given keep the detector's default."""
    denominators: Literal["global", "original"] = "global"
    """Sums over the accumulation window and all ranks, or the rule of the original program."""


@dataclass
class EvalConfig:
    """Evaluation."""

    backend: Literal["faster", "pycocotools"] = "faster"
    """Package that computes the COCO numbers; both give the same ones."""
    metric_for_best: str = "bbox_AP"
    """Metric that `best` and early stopping go by; "ema/bbox_AP" takes that of the averaged weights."""
    early_stopping_patience: PositiveInt | None = None
    """Evaluations without a better metric after which training stops."""
    batch_size_per_device: PositiveInt = 32
    """Images of one evaluation batch on one device."""
    score_threshold: ClosedUnitInterval = 0.0
    """Detections below this score are left out of the evaluation."""
    pictures: NonNegativeInt = 8
    """Validation images drawn at each evaluation."""


