"""Settings shared by all scripts, one dataclass per topic; those of a detector stand beside it, in its `options.py`.

Every default stands in one of these dataclasses or in the `Config` of a script, nowhere else; a YAML file states only
what differs.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from jsonargparse import set_parsing_settings
from jsonargparse.typing import ClosedUnitInterval, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from toolkit.files import MAX_IMAGE_PIXELS

set_parsing_settings(docstring_parse_attribute_docstrings=True)


@dataclass
class RunConfig:
    """The run: where it writes, how long it goes, when it logs, evaluates, saves and stops."""

    output_dir: str = "runs"
    """Folder that holds the run folders."""
    name: str = "run"
    """Name of the folder of this run."""
    seed: NonNegativeInt = 0
    """Seed of the initial weights, the order of the data, the augmentation and dropout."""
    epochs: PositiveInt = 10
    """Passes over the training data."""
    max_steps: PositiveInt | None = None
    """Optimizer steps after which training ends, if that is sooner than `run.epochs`."""
    max_minutes: PositiveFloat | None = None
    """Minutes of training, without evaluation and saving. They are turned into a number of steps by the measured speed
    of the first steps. This is corrected as the speed changes, until half of the minutes are over. Minutes trained
    before a resume count."""
    log_every: PositiveInt = 10
    """Optimizer steps between two rows of metrics.jsonl."""
    meters: Literal["epoch_median", "run_median", "epoch_mean", "run_mean", "momentum"] = "epoch_median"
    """How console lines smooth a loss: the median of the last 20 steps with the mean of the epoch or of the run, that
    mean alone, or a mean in which each step counts less than the next one (momentum 1 - 1 / steps of an epoch)."""
    eval_every: int | str = "1 epoch"
    """Optimizer steps between two evaluations, or a number of epochs such as "2 epochs"; 0 evaluates only at the
    end."""
    save_every: int | str = "1 epoch"
    """Optimizer steps between two checkpoints, or a number of epochs such as "2 epochs"; 0 saves only at the end."""
    keep: PositiveInt = 2
    """Number of newest checkpoints that are kept, beside `best`."""
    keep_every: int | str = 0
    """Checkpoints whose step is a multiple of this are kept for good: steps, or "100 epochs"; 0 keeps none for
    good."""
    resume: str = "never"
    """Where to go on from: never, latest (of this run folder, or a fresh start), or the path of a checkpoint or
    run."""
    resume_schedule: Literal["saved", "new"] = "saved"
    """On resume, whether the learning rates and the length of the run are those of the checkpoint or of this
    command."""
    tracker: list[str] | str = "none"
    """Programs that rows and pictures are also sent to: none, wandb, tensorboard, another that Accelerate knows, or a
    list of them."""
    track_unscaled: bool = False
    """Also send the losses before their weights, `..._unscaled`, to the trackers; metrics.jsonl has them always."""
    project: str = "detection-toolkit"
    """Name of the project that the run has in its trackers."""
    group: str | None = None
    """Name that the runs of one sweep or ablation share in W&B."""
    job_type: str | None = None
    """Kind of run in W&B; without a value it is train, or eval with `run.eval_only`."""
    tags: list[str] = field(default_factory=list)
    """Words by which the run is found in W&B."""
    notes: str = ""
    """Why the run was made, in W&B."""
    on_nonfinite: Literal["stop", "skip", "rollback"] = "stop"
    """What the guard does when a loss, gradient or buffer is NaN or infinite. It acts before the weights are
    updated."""
    max_skips: NonNegativeInt = 10
    """Optimizer steps that the guard may skip in a row before it stops the run."""
    max_rollbacks: NonNegativeInt = 3
    """Rollbacks to a checkpoint that the guard may make before it stops the run."""
    rollback_lr_factor: PositiveFloat = 1.0
    """Factor on every learning rate after each rollback."""
    precision: Literal["no", "fp16", "bf16", "auto"] | None = None
    """Precision of the forward pass under autocast. Without a value it is what `accelerate launch` was told, then that
    of the run that is resumed, then float32. auto is the same, but in place of float32 it chooses: on a GPU that has
    them, bf16 with `run.tf32`; on a CPU with instructions for bfloat16, bf16 if the first batch is then trained on
    faster. What is used stands in config.yaml. Losses are always computed in float32."""
    tf32: bool | None = None
    """Round the inputs of float32 products on a GPU to TensorFloat-32, which is several times as fast; without a value
    PyTorch's choice, which is to round those of convolutions only."""
    deterministic: bool = False
    """Use deterministic algorithms, and name each operation that has none in one warning."""
    threads: PositiveInt | None = None
    """CPU threads of one process. Without a value OMP_NUM_THREADS decides; where `accelerate launch`, not you, has set
    it to 1, all cores are shared among the processes."""
    hang_minutes: PositiveFloat = 30.0
    """Minutes that one process waits for another one, once training has begun, before the run ends. It must be more
    than an evaluation takes, and than the report at the end."""
    probe_memory: bool = False
    """Run the largest batch and one evaluation batch before the first step, so that memory runs out then or never."""
    eval_only: bool = False
    """Evaluate the weights of `run.resume` and stop."""
    export: bool = False
    """At the end, write the detector as ONNX and torch.export beside `final/`, and check both on validation images."""


@dataclass
class DataConfig:
    """The data, and how images become batches."""

    path: str | None = None
    """Folder of a data set as an annotation tool leaves it (Pascal VOC, YOLO, COCO, CSV, `datasets`); `data.train` and
    `data.val` are then names of its splits."""
    train: str = "train"
    """Training data: an annotation file, a folder, or the name of a split."""
    val: str | float = "val"
    """Validation data: an annotation file, a folder, the name of a split, or a share of the training data (0.2 or 20%)
    that is held out of it by the content of its images."""
    image_dir: str | list[str] | None = None
    """Where the images are: a folder, a .zip or .tar (or a folder in it), a URL that fsspec knows (s3://bucket/folder),
    or a list of these; without a value a folder is looked for beside the annotation file."""
    format: Literal[
        "auto", "shapes", "coco", "hub", "visual_genome", "psg", "vrd", "gqa", "open_images", "voc", "yolo", "csv"
    ] = "auto"
    """How to read the training and validation data; auto recognises it, shapes is the bundled data set. With
    `data.path`, shapes means auto."""
    name: str | None = None
    """Hub name or local folder of a `datasets` data set, folder of the Visual Genome files, or path of psg.json;
    `data.train` and `data.val` are then names of its splits."""
    streaming: bool = False
    """Leave the images of a `datasets` data set in its Parquet files and read them row group by row group, each process
    its own; without it they are copied into the cache first."""
    workers: NonNegativeInt = 2
    """Processes that load images, for each device."""
    batch_size_per_device: PositiveInt = 16
    """Images of one micro-batch on one device."""
    image_size: PositiveInt = 128
    """Side in pixels of the square that images are resized to, unless `data.scales` is given."""
    scales: list[int] = field(default_factory=list)
    """Lengths in pixels of the shorter side of an image: one is drawn for each training image, the last one is used in
    evaluation. Without any, images become squares of `data.image_size`."""
    max_size: PositiveInt = 1333
    """Longest side of an image in pixels, with `data.scales`."""
    random_crop: bool = False
    """With `data.scales`, cut a random region out of half of the training images before the last resize, as DETR
    does."""
    recipe: Literal["detr", "ssd", "yolov3"] = "detr"
    """Whose augmentation it is: the order of the steps, and what photometric, zoom_out and iou_crop mean exactly."""
    flip: bool = True
    """Mirror half of the training images left to right. Relations are mirrored too: "left of" becomes "right of"; an
    image with one that has no name there stays as it is."""
    mirrored_predicates: dict[str, str] = field(default_factory=dict)
    """Predicates that change places in a mirrored image although their names do not say left and right, such as
    {west of: east of}."""
    photometric: bool = False
    """Vary brightness, contrast, saturation and hue of training images."""
    zoom_out: float = 1.0
    """Put half of the training images on a canvas of up to this many times their sides; 1 puts none."""
    iou_crop: bool = False
    """Cut a region that overlaps the boxes by a drawn IoU out of training images, as SSD does."""
    multi_scale: list[int] = field(default_factory=list)
    """Sides in pixels of training images, one drawn for a whole batch; without any, all have `data.image_size`."""
    multi_scale_every: PositiveInt = 1
    """Micro-batches between two draws of a side from `data.multi_scale`."""
    multi_scale_pixels: bool = False
    """With `data.multi_scale`, change the number of images of a batch so that its number of pixels stays the same."""
    mixup: bool = False
    """Mix each training image with another one; the boxes of each weigh as much as their image."""
    mosaic: ClosedUnitInterval = 0.0
    """Probability that a training image is put together of four."""
    batch_mixup: ClosedUnitInterval = 0.0
    """Probability that each image of a batch is mixed with the one before it in the batch, as DEIM does."""
    copy_blend: ClosedUnitInterval = 0.0
    """Probability that up to three objects of a batch that is not mixed are blended into each of its images."""
    augment: str | list[Any] | None = None
    """Transforms of torchvision.transforms.v2 by name with their arguments, as a list or a YAML file with one. Training
    images pass them first, then what the other settings say."""
    repeat_factor: ClosedUnitInterval = 0.0
    """Share of the images from which a class is rare: images with rarer classes are shown more often in an epoch (Gupta
    et al. 2019); 0 shows every image once."""
    predicate_repeat_factor: ClosedUnitInterval = 0.0
    """Share of the images from which a predicate is rare: images with rarer relations are shown more often in an epoch
    (as Li et al. 2021 resample them); 0 shows every image once."""
    plain_epochs: float = 20
    """Number of last epochs without what `data.plain_without` names; a value below 1 is a share of the epochs of the
    run."""
    plain_without: list[
        Literal[
            "mixup", "mosaic", "batch_mixup", "copy_blend", "photometric", "zoom_out", "iou_crop", "augment",
            "multi_scale",
        ]
    ] = field(default_factory=lambda: ["mixup", "mosaic", "batch_mixup", "copy_blend"])
    """What the last `data.plain_epochs` are without: mixup, mosaic, batch_mixup, copy_blend, photometric, zoom_out,
    iou_crop, augment, multi_scale."""
    group_by_aspect_ratio: bool = False
    """Make batches of either wide or tall images."""
    cache_images: bool = False
    """Keep decoded images in memory; for small data sets."""
    keep_images_without_relations: bool = False
    """Of Visual Genome, train on the images that have boxes and no relation too, as detectors can; the images of
    validation and test are the same."""
    on_error: Literal["raise", "drop"] = "raise"
    """Stop at faulty records and name all of them, or leave them out and list them in the run folder."""
    max_image_pixels: PositiveInt = MAX_IMAGE_PIXELS
    """Pixels (width times height) that an image may have; a larger one is a faulty record, and is never decoded."""
    max_train_images: PositiveInt | None = None
    """Use only this many images, the first ones, of the training data."""
    overfit_batches: PositiveInt | None = None
    """Train on this many batches only, without augmentation, and evaluate on them. A sound model learns them by
    heart."""


@dataclass
class OptimConfig:
    """The optimizer step."""

    name: Literal["adamw", "adam", "sgd"] = "adamw"
    """Update rule of the weights."""
    lr: NonNegativeFloat = 1e-4
    """Learning rate of everything but the backbone."""
    backbone_lr: NonNegativeFloat | None = None
    """Learning rate of the backbone; without a value it is `optim.lr`."""
    scale_lr_by_images: bool = False
    """Multiply all learning rates by the number of images of an optimizer step over all processes."""
    lr_multipliers: dict[str, float] = field(default_factory=dict)
    """Factors on the learning rate, by prefix of the names of the parameters."""
    layer_decay: PositiveFloat = 1.0
    """Factor on the learning rate from each layer of the timm backbone to the layer before it."""
    bias_lr_factor: PositiveFloat = 1.0
    """Factor on the learning rate of biases."""
    weight_decay: NonNegativeFloat = 1e-4
    """Weight decay of all parameters that no other setting names."""
    bias_weight_decay: NonNegativeFloat | None = None
    """Weight decay of biases; without a value it is `optim.weight_decay`."""
    no_weight_decay_on_norm_and_bias: bool = False
    """Leave norm layers and biases without weight decay."""
    momentum: NonNegativeFloat = 0.9
    """Momentum of SGD."""
    nesterov: bool = False
    """Use Nesterov's form of the momentum of SGD."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    """Decays of the two moving averages of Adam and AdamW, of gradients and of their squares."""
    max_norm: NonNegativeFloat = 0.1
    """Norm that the gradients of all parameters together are clipped to; 0 clips nothing."""
    accumulation_steps: PositiveInt = 1
    """Micro-batches of one optimizer step."""
    accumulate_after_epoch: NonNegativeInt = 0
    """First epoch, counted from 0, in which steps have `optim.accumulation_steps` micro-batches; before it they have
    one."""
    ema_decay: ClosedUnitInterval = 0.0
    """Decay of the moving average of the weights; 0 makes no average."""
    ema_warmup: bool = True
    """Let the moving average forget the initial weights sooner: its decay begins at 0.1 and rises to
    `optim.ema_decay`."""
    bn_momentum_final: float | None = None
    """Momentum of batch norms at the end of training, reached on a cosine from 0.1 after the warm-up; without a value
    it stays as it is."""
    gradient_table_every: NonNegativeInt = 0
    """Optimizer steps between two tables of the largest gradients on the console; 0 shows none."""
    compile: bool | str | None = None
    """Compile the model's repeated blocks with torch.compile, which needs a C++ compiler and a minute or two at the
    start, less when they are in its cache on disk; a name chooses its backend. Without a value it is `--dynamo_backend`
    of `accelerate launch`, then that of the run that is resumed, then not."""


@dataclass
class ScheduleConfig:
    """The learning rate as a function of the optimizer step, or of the validation."""

    name: Literal[
        "constant", "step", "multistep", "cosine", "poly", "linear", "exponential", "cyclic", "plateau"
    ] = "constant"
    """Shape of the learning rate after the warm-up; plateau lets it fall when `eval.metric_for_best` stops
    improving."""
    warmup_steps: int | str = 0
    """Optimizer steps, or "N epochs", over which the learning rate rises linearly."""
    warmup_factor: NonNegativeFloat = 0.001
    """Factor on the learning rate at the first step of the warm-up."""
    warmup_method: Literal["linear", "constant"] = "linear"
    """Whether the learning rate rises during the warm-up (linear) or keeps the factor of the first step (constant)."""
    per: Literal["step", "epoch"] = "step"
    """Whether the learning rate changes at every optimizer step after the warm-up, or only when an epoch begins."""
    milestones: list[int | str] = field(default_factory=list)
    """With multistep and cyclic: steps, or "N epochs", after which the learning rate is multiplied by
    `schedule.gamma`."""
    step_size: int | str = "200 epochs"
    """With step: steps, or "N epochs", from one decay to the next. With cyclic: length of a stair."""
    gamma: PositiveFloat = 0.1
    """Factor of one decay of step, multistep, cyclic and plateau."""
    power: PositiveFloat = 0.9
    """Exponent of poly."""
    final_factor: NonNegativeFloat = 0.0
    """Factor on the learning rate that cosine, poly, linear, exponential and cyclic end at."""
    stairs: PositiveInt = 5
    """With cyclic: stairs of one cycle; the lowest learning rate is the highest divided by this number."""
    cycles: PositiveInt = 10
    """With cyclic: number of cycles before the last decay to `schedule.final_factor`."""
    last_cycle: Literal["linear", "cosine"] = "linear"
    """With cyclic: shape of the last decay."""
    plateau_patience: PositiveInt = 2
    """With plateau: evaluations in a row without improvement before the learning rate falls."""
    plateau_threshold: NonNegativeFloat = 1e-3
    """With plateau: what an evaluation must exceed the best one by to be an improvement."""
    plateau_cooldown: NonNegativeInt = 0
    """With plateau: evaluations after a fall that cannot count against it."""
    max_decays: PositiveInt = 3
    """With plateau: training ends when the learning rate has fallen this many times."""


@dataclass
class LossConfig:
    """The weights of the losses, and what they are divided by."""

    weights: dict[str, float | str | list] = field(default_factory=dict)
    """Weights of losses by name: a number, "learned", or [[step, value], ...]. Losses that are not named keep the
    weight of the detector."""
    denominators: Literal["global", "original"] = "global"
    """Divide losses by sums over the accumulation window and all processes, or by the rule of the original program."""


@dataclass
class EvalConfig:
    """Evaluation."""

    backend: Literal["toolkit", "pycocotools"] = "toolkit"
    """Program that computes the COCO numbers: this toolkit, or pycocotools, the slower reference; both give the same
    ones."""
    metric_for_best: str = "bbox_AP"
    """Metric that `best` and early stopping go by; ema/bbox_AP is that of the averaged weights."""
    early_stopping_patience: PositiveInt | None = None
    """Evaluations without a better metric after which training stops; without a value it goes on to its end."""
    batch_size_per_device: PositiveInt = 32
    """Images of one evaluation batch on one device."""
    score_threshold: ClosedUnitInterval = 0.0
    """Score that a detection must have to be evaluated."""
    pictures: NonNegativeInt = 8
    """Number of validation images that are drawn at each evaluation."""
    test_split: str | None = None
    """Split or file that the best weights are evaluated on once, when training has ended, as `test/...`; nothing is
    decided by it. Without a value there is none."""
    before_training: bool = False
    """Evaluate before the first step too."""


@dataclass
class SceneGraphEvalConfig(EvalConfig):
    """Evaluation."""

    metric_for_best: str = "R@100"
    """Metric that `best`, early stopping and the plateau schedule go by."""
    protocol: Literal["original", "strict"] = "original"
    """How recall is counted. original, as published, leaves out images in which no pair is predicted, and counts
    predicates that the data do not have as 0 in mR; strict counts such images as 0 and leaves such predicates out."""
    zero_shot: str | None = None
    """File with the triplets for zR@K (CSV or zeroshot_triplet.pytorch); without a value, those that the training data
    do not have."""


@dataclass
class HubConfig:
    """The Hugging Face hub, to which a run can go when it has ended."""

    push: str | None = None
    """Name, such as me/blood-cells, under which `final/` is uploaded after the report. It needs `hf auth login` or
    HF_TOKEN, which is checked before anything else."""
    private: bool = False
    """Let nobody else see a model that the upload makes."""
