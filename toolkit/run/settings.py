"""Settings shared by all scripts, one dataclass per topic; those of a detector are in `options.py` of its family.

Every default is in one of these dataclasses or in the `Config` of a script; a YAML file states only what differs.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from toolkit.base.files import MAX_IMAGE_PIXELS
from toolkit.base.number_types import (
    ClosedUnitInterval,
    Decay,
    EpochsInt,
    FewInt,
    FewOrNoneInt,
    Magnification,
    Minutes,
    MovingAverage,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ShareOfTile,
    Time,
)


@dataclass
class RunConfig:
    """Settings of a run: its folder, length, logging, intervals of evaluation, checkpoints, resuming, experiment
    trackers, NaN guard, precision and processes."""

    output_dir: str = "runs"
    """Folder in which run folders are created."""
    name: str = "run"
    """Name of the run and of its folder inside `run.output_dir`."""
    seed: NonNegativeInt = 0
    """Random seed for weight initialisation, data order, augmentation and dropout."""
    epochs: EpochsInt = 10
    """Number of passes over the training data."""
    max_steps: PositiveInt | None = None
    """Maximum number of optimizer steps; training ends after them even if `run.epochs` would go on longer."""
    max_minutes: Minutes | None = None
    """Maximum training time in minutes, excluding evaluation and saving and including the time before a resume. It is
    converted into a number of steps from the measured speed, which is corrected as the speed changes; when half of the
    time is over, the number can only become smaller than it is then. When the time is over, training ends."""
    log_every: PositiveInt = 10
    """Number of optimizer steps between two rows of metrics.jsonl and lines of the console; the first and the last step
    of an epoch have them too."""
    meters: Literal["epoch_median", "run_median", "epoch_mean", "run_mean", "momentum"] = "epoch_median"
    """Smoothing of losses on the console: epoch_median or run_median (median of the last 20 steps), epoch_mean or
    run_mean (mean since the epoch or the run began), or momentum (exponential moving average with momentum 1 - 1 /
    steps of an epoch). epoch_median and epoch_mean begin anew with each epoch."""
    eval_every: NonNegativeInt | Time = "1 epoch"
    """Evaluation interval: optimizer steps, or a number of epochs such as "2 epochs"; 0 evaluates only at the end."""
    save_every: NonNegativeInt | Time = "1 epoch"
    """Checkpoint interval: optimizer steps, or a number of epochs such as "2 epochs"; 0 saves only at the end. Before
    each evaluation the state is saved too."""
    keep: PositiveInt = 2
    """Number of newest checkpoints to keep, in addition to `best`."""
    keep_every: NonNegativeInt | Time = 0
    """Keep every checkpoint whose step is a multiple of this interval for good: optimizer steps, or a number of epochs
    such as "100 epochs"; 0 keeps none for good."""
    resume: str = "never"
    """What to resume from: never; latest (the newest checkpoint of this run folder; a fresh start if there is none); or
    the path of a checkpoint or run."""
    resume_schedule: Literal["saved", "new"] = "saved"
    """Learning rate schedule and training length after a resume: those of the checkpoint (saved) or those of this
    command (new). The same command, repeated after a kill, goes on with what it began."""
    tracker: list[str] | str = "none"
    """Experiment trackers that also receive rows and pictures: none, wandb, tensorboard, another one that Accelerate
    supports, or a list of them."""
    track_unscaled: bool = False
    """Also send the unweighted losses (`..._unscaled`) to the trackers; metrics.jsonl always has them."""
    project: str = "detection-toolkit"
    """Project name in the trackers."""
    group: str | None = None
    """Group name in W&B, shared by the runs of one sweep or ablation."""
    job_type: str | None = None
    """Job type in W&B; null: train, or eval with `run.eval_only`."""
    tags: list[str] = field(default_factory=list)
    """Tags of the run in W&B."""
    notes: str = ""
    """Notes on the run in W&B, such as why it was made."""
    on_nonfinite: Literal["stop", "skip", "rollback"] = "stop"
    """What to do when a loss, gradient or buffer is NaN or infinite, always before the weights are updated: stop the
    run, skip the step, or roll back to the last checkpoint."""
    max_skips: NonNegativeInt = 10
    """Number of consecutive optimizer steps that may be skipped before the run stops (`run.on_nonfinite skip`)."""
    max_rollbacks: NonNegativeInt = 3
    """Number of rollbacks that may be made before the run stops (`run.on_nonfinite rollback`)."""
    rollback_lr_factor: PositiveFloat = 1.0
    """Factor applied to all learning rates after each rollback."""
    precision: Literal["no", "fp16", "bf16", "auto"] | None = None
    """Autocast precision of the forward pass; losses are always computed in float32. null: the precision given to
    `accelerate launch`, else that of the resumed run, else float32. auto: the same, but instead of float32 it chooses
    bf16 where that is faster: on a GPU that has it, with `run.tf32`; on a CPU with instructions for it, but for mobile
    backbones. config.yaml records the one in use. Evaluation is always in float32."""
    tf32: bool | None = None
    """Use TensorFloat-32 for float32 matrix products on a GPU, which is several times faster and less precise; null:
    PyTorch's default, which is TF32 in convolutions only."""
    deterministic: bool = False
    """Use deterministic algorithms; operations that have none are named in one warning."""
    threads: FewInt | None = None
    """CPU threads of each process. null: OMP_NUM_THREADS; if `accelerate launch` set that to 1 by itself, the cores are
    divided among the processes instead."""
    hang_minutes: Minutes = 30.0
    """Timeout in minutes after which a process that waits for another one ends the run, once training has begun. It
    must be longer than an evaluation and than the report at the end."""
    probe_memory: bool = False
    """Run the largest training batch and an evaluation batch before the first step, so that running out of memory
    happens at the start or not at all."""
    eval_only: bool = False
    """Evaluate the weights given by `run.resume`, without training."""
    export: bool = False
    """Export the detector to ONNX and torch.export at the end, beside `final/`, and check both files on validation
    images."""
    export_check: bool = True
    """With `run.export`, also export the detector before the first step, to a folder that is deleted at once: what
    cannot be exported is said then, not after the training."""


@dataclass
class DataConfig:
    """Settings of the data, their augmentation and the batches."""

    path: str | list[str] | None = None
    """Folder of a data set in Pascal VOC, YOLO, COCO, CSV or `datasets` format, or of LabelMe, VIA, CVAT, Label Studio
    or Supervisely, which is recognised; `data.train` and `data.val` are then names of its splits. A list: several data
    sets, trained on together."""
    train: str | list[str] = "train"
    """Training data: an annotation file, a folder, or the name of a split. A list: several data sets, whose classes are
    joined by name."""
    shares: list[PositiveFloat] = field(default_factory=list)
    """With several training sets: the share of the training samples that each of them gets, such as [2, 1]; an epoch
    keeps its length. Empty: every image once an epoch."""
    unlisted_classes: Literal["unknown", "background"] = "unknown"
    """With several data sets: what a class that is not in a set's own list is in its images: unknown (objects of it may
    be there, so no loss makes it less likely there) or background (there are none)."""
    classes: dict[str, Any] = field(default_factory=dict)
    """Classes under other names, for training, validation and test data alike: {car: vehicle, truck: vehicle, tree:
    null} renames two classes, which merges them, and leaves the boxes of a third out. "*" stands for all classes that
    are not named; without it they stay as they are."""
    val: str | float | list[str] = "val"
    """Validation data: an annotation file, a folder, the name of a split, or a fraction of the training data to hold
    out (0.2 or 20%; 1/5 to 5/5: the folds of a cross-validation), chosen by image content."""
    image_dir: str | list[str] | None = None
    """Location of the images: a folder, a .zip or .tar archive (or a folder in one), an fsspec URL such as
    s3://bucket/folder, or a list of these; null: a folder is looked for beside the annotation file."""
    format: Literal[
        "auto",
        "shapes",
        "coco",
        "hub",
        "visual_genome",
        "psg",
        "vrd",
        "gqa",
        "open_images",
        "voc",
        "yolo",
        "csv",
        "labelme",
        "via",
        "cvat",
        "label_studio",
        "supervisely",
    ] = "auto"
    """Format of the training and validation data; auto recognises it, shapes is the bundled data set. With `data.path`,
    shapes means auto."""
    name: str | None = None
    """Hub name or local folder of a `datasets` data set, folder of the Visual Genome files or one HDF5 file of it, or
    path of psg.json; `data.train` and `data.val` are then names of its splits."""
    streaming: bool = False
    """Read the images of a `datasets` data set directly from its Parquet files, one row group at a time and different
    ones in each process, instead of copying them into the cache first."""
    workers: FewOrNoneInt = 2
    """Number of data loading processes per device."""
    batch_size_per_device: PositiveInt = 16
    """Number of images in a micro-batch on each device."""
    image_size: PositiveInt | list[PositiveInt] = 128
    """Size in pixels that images are resized to: the side of a square, or [height, width], such as [384, 640] for
    pictures of 16:9; not used with `data.scales`."""
    tile: PositiveInt | list[PositiveInt] | None = None
    """Cut large pictures into tiles of this size in pixels: the longer side, with the aspect of `data.image_size`, or
    [height, width]. Training sees tiles, evaluation joins the detections of all tiles of a picture. null: whole
    pictures."""
    tile_overlap: ShareOfTile = 0.2
    """With `data.tile`, the share of a side that neighbouring tiles have in common, 0 to 0.9; objects up to that size
    are whole in one of them."""
    tile_visible: ClosedUnitInterval = 0.25
    """With `data.tile`, the share of an object (of its mask if that is read, else of its box) that a tile must show: of
    less, it is neither object nor background there; it is ignored as crowd regions are."""
    tile_empty: ClosedUnitInterval = 0.25
    """With `data.tile`, the share of the tiles without objects that training sees in an epoch, others in each epoch;
    0: none, 1: all."""
    scales: list[PositiveInt] = field(default_factory=list)
    """Lengths of the shorter image side in pixels: training draws one for each image, evaluation uses the last one.
    Empty: images get `data.image_size`."""
    max_size: PositiveInt = 1333
    """Maximum length of the longer image side in pixels, with `data.scales`."""
    random_crop: bool = False
    """With `data.scales`, crop half of the training images at random before the last resize, as in DETR."""
    recipe: Literal["detr", "ssd", "yolov3"] = "detr"
    """Augmentation recipe: order of the transforms, and exact definition of photometric, zoom_out and iou_crop, of
    DETR, SSD or YOLOv3."""
    flip: bool = True
    """Flip training images horizontally with probability 0.5. Relations are mirrored too ("left of" becomes "right
    of"); an image with a relation that has no mirrored name is not flipped."""
    mirrored_predicates: dict[str, str] = field(default_factory=dict)
    """Pairs of predicates that swap when an image is flipped although their names do not say left and right, such as
    {west of: east of}."""
    photometric: bool = False
    """Jitter brightness, contrast, saturation and hue of training images."""
    zoom_out: Magnification = 1.0
    """Place half of the training images on a canvas of up to this multiple of their sides; 1 disables it."""
    iou_crop: bool = False
    """Crop training images to a random region with a randomly drawn minimum IoU with the boxes, as in SSD."""
    multi_scale: list[PositiveInt | list[PositiveInt]] = field(default_factory=list)
    """Multi-scale training: image sizes in pixels, sides or [height, width] of the aspect of `data.image_size`, one
    drawn for each batch. Empty: every batch has `data.image_size`."""
    multi_scale_every: PositiveInt = 1
    """Number of micro-batches between two draws from `data.multi_scale`."""
    multi_scale_pixels: bool = False
    """With `data.multi_scale`, adapt the number of images in a batch to keep its number of pixels constant."""
    mixup: bool = False
    """Blend each training image with another one (mixup); the loss of each box is weighted by the share of its
    image."""
    mosaic: ClosedUnitInterval = 0.0
    """Probability that a training image is a mosaic of four images."""
    batch_mixup: ClosedUnitInterval = 0.0
    """Probability that each image of a batch is blended with the previous one of the batch, as in DEIM."""
    copy_blend: ClosedUnitInterval = 0.0
    """Probability that up to three objects of a batch are blended into each of its images, as in DEIMv2; applies to
    batches without mixup."""
    augment: str | list[Any] | None = None
    """Augmentation policy of your own: torchvision.transforms.v2 transforms by name with their arguments, as a list or
    a YAML file. Applied to training images before the other augmentations."""
    boxes_from_masks: bool = False
    """Train on the tight boxes around the masks of objects, as they are after augmentation, in place of the annotated
    boxes; for detectors without masks too. Metrics are still those of the annotated boxes."""
    repeat_factor: ClosedUnitInterval = 0.0
    """Repeat-factor sampling threshold (LVIS, Gupta et al. 2019): images with classes that occur in a smaller fraction
    of images are oversampled; 0 disables it."""
    predicate_repeat_factor: ClosedUnitInterval = 0.0
    """Repeat-factor sampling threshold for relations (as in Li et al. 2021): images with predicates that occur in a
    smaller fraction of images are oversampled; 0 disables it."""
    plain_epochs: NonNegativeFloat = 20
    """Number of final epochs without the augmentations in `data.plain_without`; a value below 1 is a fraction of the
    training."""
    plain_without: list[
        Literal[
            "mixup", "mosaic", "batch_mixup", "copy_blend", "photometric", "zoom_out", "iou_crop", "augment",
            "multi_scale",
        ]
    ] = field(default_factory=lambda: ["mixup", "mosaic", "batch_mixup", "copy_blend"])
    """Augmentations that are switched off in the last `data.plain_epochs`: any of mixup, mosaic, batch_mixup,
    copy_blend, photometric, zoom_out, iou_crop, augment, multi_scale."""
    group_by_aspect_ratio: bool = False
    """Make batches of either landscape or portrait images, which reduces padding."""
    cache_images: bool = False
    """Cache decoded images in memory; for small data sets."""
    decode: Literal["full", "reduced"] = "full"
    """How JPEGs are decoded for training and evaluation. full: in their own size; reduced: at 1/2, 1/4 or 1/8 of their
    sides where these are large enough, which is faster and changes pixels a little. An image keeps at least 1.5 times
    the size that the settings of `data` can ask for. Images of other formats, and all images with `data.tile`,
    `data.mixup` or `data.augment`, which use them in their own size, are decoded in full."""
    keep_images_without_relations: bool = False
    """Visual Genome: also train on images that have boxes but no relations, as is useful for detectors; validation and
    test images do not change."""
    crowds: Literal["ignore", "objects"] = "ignore"
    """What boxes are that the data mark as crowd regions (COCO's iscrowd, VOC's difficult). ignore: neither objects nor
    background; objects: single objects like all others, such as the brush masks of CVAT, which have iscrowd 1."""
    allow_mostly_empty: bool = False
    """Train although more than 19 of 20 training images have no object. Labels that are not found look like this, so
    that it is refused otherwise."""
    on_error: Literal["raise", "drop"] = "raise"
    """What to do with faulty records in the data: raise stops the run and lists all of them, drop leaves them out and
    lists them in the run folder."""
    max_image_pixels: PositiveInt = MAX_IMAGE_PIXELS
    """Maximum number of pixels (width times height) of an image; a larger image is a faulty record and is never
    decoded."""
    white: PositiveInt | None = None
    """Value of 16-bit images that becomes white (255), as do larger ones: 4095 for 12 bits. null: 65535. Images of 8
    bits do not change."""
    max_train_images: PositiveInt | None = None
    """Use only the first N training images; null: all."""
    overfit_batches: PositiveInt | None = None
    """Sanity check: train and evaluate on this many batches, without augmentation. A sound model learns them by
    heart."""


@dataclass
class OptimConfig:
    """Settings of the optimizer, gradient accumulation and clipping, averaged weights (EMA) and compilation."""

    name: Literal["adamw", "adam", "sgd", "muon"] = "adamw"
    """Optimizer. muon: torch's Muon for matrices (linear layers, attention) and AdamW for all else, with the learning
    rate and weight decay of AdamW."""
    lr: NonNegativeFloat = 1e-4
    """Learning rate of all parameters except the backbone's."""
    backbone_lr: NonNegativeFloat | None = None
    """Learning rate of the backbone; null: `optim.lr`."""
    scale_lr_by_images: bool = False
    """Multiply all learning rates by the number of images in an optimizer step, over all processes."""
    lr_multipliers: dict[str, NonNegativeFloat] = field(default_factory=dict)
    """Learning rate factors by prefix of parameter names, such as {head: 10}."""
    layer_decay: Decay = 1.0
    """Layer-wise learning rate decay of a timm backbone: factor from each layer to the one before it; 1 disables it."""
    bias_lr_factor: PositiveFloat = 1.0
    """Learning rate factor of biases."""
    weight_decay: NonNegativeFloat = 1e-4
    """Weight decay of all parameters without a more specific setting."""
    bias_weight_decay: NonNegativeFloat | None = None
    """Weight decay of biases; null: `optim.weight_decay`."""
    no_weight_decay_on_norm_and_bias: bool = False
    """Exclude normalisation layers and biases from weight decay."""
    momentum: NonNegativeFloat = 0.9
    """Momentum of SGD."""
    nesterov: bool = False
    """Use Nesterov momentum in SGD."""
    betas: list[MovingAverage] = field(default_factory=lambda: [0.9, 0.999])
    """Adam and AdamW: decay rates of the moving averages of gradients and of squared gradients."""
    max_norm: NonNegativeFloat = 0.1
    """Gradient clipping: maximum norm of the gradients of all parameters together; 0 disables it."""
    accumulation_steps: PositiveInt = 1
    """Gradient accumulation: number of micro-batches in an optimizer step."""
    accumulate_after_epoch: NonNegativeInt = 0
    """First epoch, counted from 0, that accumulates `optim.accumulation_steps` micro-batches; earlier epochs do not
    accumulate."""
    ema_decay: ClosedUnitInterval = 0.0
    """Decay of the exponential moving average (EMA) of the weights; 0 disables it."""
    ema_warmup: bool = True
    """Warm up the EMA: its decay starts at 0.1 and rises to `optim.ema_decay`, so that the initial weights are
    forgotten sooner."""
    bn_momentum_final: ClosedUnitInterval | None = None
    """BatchNorm momentum at the end of training, reached from 0.1 on a cosine schedule after the warm-up; null:
    unchanged."""
    gradient_table_every: NonNegativeInt = 0
    """Interval, in optimizer steps, at which a table of the largest gradients is printed, and once at the first step of
    each start; 0 disables it."""
    checkpointing: bool = False
    """Gradient checkpointing: the repeated blocks of the model (layers of a transformer, blocks of a backbone) keep
    their inputs alone and compute the rest again in the backward pass, which needs less memory and more time; the
    results are the same to the bit."""
    compile: bool | str | None = None
    """Compile the repeated blocks of the model with torch.compile: true, or the name of a backend; graphs: compile the
    parts of an SSD, YOLOv3 or RT-DETR whose shapes are fixed, and run each as one CUDA graph. It needs a C++ compiler
    and a minute or two at the start, less with its cache. null: `--dynamo_backend` of `accelerate launch`, else that of
    the resumed run, else off."""


@dataclass
class ScheduleConfig:
    """Settings of the learning rate schedule."""

    name: Literal[
        "constant", "step", "multistep", "cosine", "poly", "linear", "exponential", "cyclic", "plateau"
    ] = "constant"
    """Shape of the learning rate after the warm-up; plateau reduces it when `eval.metric_for_best` stops improving."""
    warmup_steps: NonNegativeInt | Time = 0
    """Length of the learning rate warm-up: optimizer steps, or a number of epochs such as "2 epochs"; 0 disables it."""
    warmup_factor: NonNegativeFloat = 0.001
    """Learning rate factor at the first step of the warm-up."""
    warmup_method: Literal["linear", "constant"] = "linear"
    """Shape of the warm-up: linear increase, or constant at `schedule.warmup_factor`."""
    per: Literal["step", "epoch"] = "step"
    """Update the learning rate at every optimizer step, or only at the start of an epoch; the warm-up is always by
    step."""
    milestones: list[NonNegativeInt | Time] = field(default_factory=list)
    """multistep, cyclic: optimizer steps, or epochs such as "30 epochs", after which the learning rate is multiplied by
    `schedule.gamma`."""
    step_size: PositiveInt | Time = "200 epochs"
    """step: interval between two decays; cyclic: length of one stair; in optimizer steps, or epochs such as "200
    epochs"."""
    gamma: Decay = 0.1
    """step, multistep, cyclic, plateau: factor by which the learning rate decays."""
    power: PositiveFloat = 0.9
    """poly: exponent of the polynomial decay."""
    final_factor: NonNegativeFloat = 0.0
    """cosine, poly, linear, exponential, cyclic: learning rate factor at the end of training."""
    stairs: PositiveInt = 5
    """cyclic: number of stairs in a cycle; the lowest learning rate is the highest divided by this number."""
    cycles: PositiveInt = 10
    """cyclic: number of cycles before the last decay to `schedule.final_factor`."""
    last_cycle: Literal["linear", "cosine"] = "linear"
    """cyclic: shape of the last decay."""
    plateau_patience: PositiveInt = 2
    """plateau: consecutive evaluations without improvement before the learning rate decays."""
    plateau_threshold: NonNegativeFloat = 1e-3
    """plateau: minimum improvement over the best evaluation that counts."""
    plateau_cooldown: NonNegativeInt = 0
    """plateau: evaluations after a decay during which a lack of improvement is not counted."""
    max_decays: PositiveInt = 3
    """plateau: training ends after this many decays of the learning rate."""


@dataclass
class LossConfig:
    """Settings of the losses: weights, normalisation and distillation."""

    weights: dict[str, float | str | list] = field(default_factory=dict)
    """Loss weights by name: a number, "learned", or a piecewise linear schedule [[step, value], ...]. Other losses keep
    the default weight of the detector."""
    denominators: Literal["global", "original"] = "global"
    """Loss normalisation: over the accumulation window and all processes (global), or by the rule of the original
    program (original)."""
    class_weights: str | dict[str, Any] | None = None
    """Weights of the classes in the classification losses of training: null (all 1), balanced (larger for rare classes,
    by the effective number of their objects in the training data), or a mapping of class names to weights, such as
    {car: 2.0}; classes that are not named have 1."""
    teacher: str | None = None
    """Distillation: run, checkpoint or `final/` folder of a trained detector with the same classes, from whose feature
    maps, and in the DETR family predictions, this one learns too (`loss_distill_...`); a resume needs it in place."""


@dataclass
class EvalConfig:
    """Settings of the evaluation."""

    backend: Literal["toolkit", "pycocotools"] = "toolkit"
    """Implementation of the COCO metrics: this toolkit, or pycocotools, the slower reference; both give the same
    values."""
    metric_for_best: str = "bbox_AP"
    """Metric that selects the best checkpoint and controls early stopping; ema/bbox_AP is that of the averaged weights.
    With model.masks, segm_AP takes the place of bbox_AP, unless a flag, or a file that sets model.masks, names it."""
    early_stopping_patience: PositiveInt | None = None
    """Early stopping: number of evaluations without improvement of `eval.metric_for_best` after which training ends;
    null disables it."""
    batch_size_per_device: PositiveInt = 16
    """Number of images in an evaluation batch on each device."""
    score_threshold: ClosedUnitInterval = 0.0
    """Minimum score of the detections that are evaluated."""
    max_detections: PositiveInt | None = None
    """Maximum number of detections of an image that are evaluated, over all classes; null: as in the original program
    of the detector (the number of queries, but at least 100; 200 of SSD; 100 of others). COCO's metrics count 100 of
    them for each class."""
    pictures: NonNegativeInt = 8
    """Number of validation images that are drawn at each evaluation."""
    test_split: str | None = None
    """Test split or file on which the best weights are evaluated once, after training (`test/...`); it influences no
    decision. null: none."""
    before_training: bool = False
    """Also evaluate before the first training step."""


@dataclass
class SceneGraphEvalConfig(EvalConfig):
    """Settings of the evaluation of scene graphs."""

    metric_for_best: str = "R@100"
    """Metric that selects the best checkpoint and controls early stopping and the plateau schedule."""
    protocol: Literal["original", "strict"] = "original"
    """How recall is averaged. original, as published: images without a predicted pair are left out, and predicates that
    do not occur in the data count as 0 in mR. strict: such images count as 0, such predicates are left out, and an
    object counts once: of several boxes on it, the one with the best score."""
    phrase_detection: bool = False
    """Compare the union box of a pair with that of the relation, instead of both boxes (phrdet); for `model.mode`
    sgdet."""
    zero_shot: str | None = None
    """File with the triplets of zero-shot recall zR@K (CSV or zeroshot_triplet.pytorch); null: the triplets that do not
    occur in the training data."""


@dataclass
class HubConfig:
    """Settings of the upload of the finished model to the Hugging Face hub."""

    push: str | None = None
    """Hugging Face hub repository, such as me/blood-cells, that `final/` is uploaded to after the report. It needs `hf
    auth login` or HF_TOKEN, which is checked before anything else."""
    private: bool = False
    """Make the hub repository private when it is created."""
