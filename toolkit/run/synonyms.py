"""Names of settings in other programs, which people type who come from them."""

import re
from collections.abc import Sequence

# By setting, the words that other training programs and papers' scripts have for it.
SYNONYMS = {
    "data.batch_size_per_device": "b batch batch_size bs per_device_train_batch_size train_batch_size",
    "data.image_size": "img img_size imgsz resolution",
    "data.path": "coco_path data data_dir data_path data_root dataset dataset_dir",
    "data.workers": "dataloader_num_workers j num_workers",
    "eval.batch_size_per_device": "per_device_eval_batch_size",
    "eval.early_stopping_patience": "patience",
    "model.architecture": "arch model model_name",
    "model.freeze_prefixes": "freeze",
    "model.pretrained": "ckpt checkpoint load_from pretrain_weights pretrained_weights weights",
    "optim.accumulation_steps": "accum_iter grad_accum_steps gradient_accumulation_steps",
    "optim.backbone_lr": "lr_backbone",
    "optim.ema_decay": "ema",
    "optim.lr": "base_lr learning_rate lr0",
    "optim.max_norm": "clip_grad clip_max_norm max_grad_norm",
    "optim.name": "optim optimizer",
    "run.epochs": "max_epochs num_epochs num_train_epochs",
    "run.eval_only": "eval test_only val_only",
    "run.eval_every": "eval_interval eval_steps",
    "run.log_every": "logging_steps print_freq",
    "run.max_steps": "iterations iters max_iter num_steps",
    "run.output_dir": "save_dir work_dir",
    "run.precision": "amp bf16 fp16 half mixed_precision",
    "run.save_every": "save_interval save_period save_steps",
    "run.tracker": "logger report_to wandb",
    "schedule.milestones": "lr_drop lr_steps",
    "schedule.name": "lr_scheduler lr_scheduler_type scheduler",
    "schedule.warmup_steps": "warmup warmup_epochs warmup_iters",
}
# What there is no setting for, and why.
ELSEWHERE = {
    **dict.fromkeys(
        ("device", "devices", "gpu", "gpu_id", "gpu_ids"),
        "there is nothing to set: a GPU is used if there is one; ACCELERATE_USE_CPU=true or CUDA_VISIBLE_DEVICES "
        "before the command choose another device",
    ),
    **dict.fromkeys(
        ("gpus", "nproc_per_node", "num_gpus", "num_processes", "world_size"),
        "the launcher starts a process for each GPU: accelerate launch --num_processes N",
    ),
    **dict.fromkeys(
        ("nc", "num_classes", "num_labels"),
        "there is nothing to set: the classes are those of your data; data.classes can merge or drop some",
    ),
}


def stray_word(word: str, before: str, names: Sequence[str]) -> str:
    """Return the sentence on a word that belongs to no flag. before: the flag and value before it, or ""."""
    key, equals, value = word.partition("=")
    meant = _meant_settings(key, names)
    if equals and _elsewhere(key):
        return f"{word}: not a flag, and {_elsewhere(key)}"
    if key == "model" and value.endswith((".pt", ".pth", ".safetensors")):  # as ultralytics names weights
        meant = ["model.pretrained"]
    if equals and meant:
        return f"{word}: not a flag; here it is --{meant[0]} {value}"
    if not before:
        return f"{word}: not a flag; expected --group.key VALUE, such as --data.path DIR"
    advice = "put quotes around a value with spaces, and around a list such as '[1, 2]'"
    return f"{word}: not expected after {before}, since a flag has one value; {advice}"


def other_name(word: str, names: Sequence[str], prefix: str = "") -> str:
    """Return the end of the sentence on a name that other programs have for a setting, or that is the last part of one;
    "" if it is not known.

    names: the existing settings. prefix: put before their names, "--" for flags.
    """
    if _elsewhere(word):
        return f"; {_elsewhere(word)}"
    meant = _meant_settings(word.removeprefix("--"), names)
    return f"; did you mean {' or '.join(prefix + name for name in meant)}?" if meant else ""


def _meant_settings(word: str, names: Sequence[str]) -> list[str]:
    """Return the settings that another program's name for one may mean, or of which it is the last part.

    Args:
        word: the name that was typed, such as "batch-size", "lr" or "model.lr".
        names: the settings that there are, by full name.
    """
    key = _plain(word)
    named_so = [name for name in names if key in map(_plain, SYNONYMS.get(name, "").split())]
    return named_so or [name for name in names if _plain(name) == key]


def _elsewhere(word: str) -> str:
    """Return why there is no setting of the name that was typed; "" if nothing is known about it."""
    reasons = {_plain(name): reason for name, reason in ELSEWHERE.items()}
    return reasons.get(_plain(word), "")


def _plain(word: str) -> str:
    """Return the last part of a name, without the signs that programs join words with."""
    return re.sub("[-_]", "", word.rpartition(".")[2]).lower()
