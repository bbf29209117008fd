"""Changed settings on resume: each is used, ignored or refused, and reported."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from toolkit.errors import BadInput

# About this start alone: they change nothing of the run.
_THIS_START = {"run.output_dir", "run.name", "run.resume", "run.resume_schedule", "run.eval_only"}
_LENGTH = {"run.epochs", "run.max_steps", "run.max_minutes"}
# They stand in the state of the optimizer and of the schedule.
_SAVED = {f"optim.{key}" for key in (
    "lr", "backbone_lr", "scale_lr_by_images", "lr_multipliers", "layer_decay", "bias_lr_factor", "weight_decay",
    "bias_weight_decay", "no_weight_decay_on_norm_and_bias", "momentum", "nesterov",
    "betas",
)}  # fmt: skip
_SEED = {"run.seed"}
_BEGINNING = {f"model.{key}" for key in ("pretrained", "pretrained_backbone", "detector", "word_vectors")}
_REFUSED = {"optim.name", "model.architecture"}


@dataclass(frozen=True)
class Change:
    """A setting of the group and key `key` that a start has otherwise than the run so far.

    verdict: used, ignored or refused. why: a clause that goes on the sentence, or "".
    """

    key: str
    before: object
    after: object
    verdict: str
    why: str = ""

    @property
    def values(self) -> str:
        return f"{self.key} {_shown(self.before)} -> {_shown(self.after)}"

    def __str__(self) -> str:
        return f"{self.values}: {self.verdict}{self.why and ', '}{self.why}"


def changes(before: Mapping, after: Mapping, keep_schedule: bool, minutes_count: bool = False) -> list[Change]:
    """Every setting that two starts both have, with different values, in the order of `after`.

    Args:
        before, after: groups of settings of the run so far and of this start.
        keep_schedule: `--run.resume_schedule saved`.
        minutes_count: the checkpoint's number of steps is still to be measured from `run.max_minutes`.
    """
    found = []
    before, after = (json.loads(json.dumps(settings)) for settings in (before, after))  # tuples are lists in a file
    for group, entries in after.items():
        earlier = before.get(group)
        for key, value in entries.items() if isinstance(earlier, dict) else ():
            name = f"{group}.{key}"
            if key in earlier and earlier[key] != value and name not in _THIS_START:
                found.append(Change(name, earlier[key], value, *_verdict(name, keep_schedule, minutes_count)))
    return found


def _verdict(name: str, keep_schedule: bool, minutes_count: bool) -> tuple[str, str]:
    new = "--run.resume_schedule new uses it"
    if name in _REFUSED:
        return "refused", "the checkpoint is of the other one"
    if name in _SEED:
        return "ignored", "the checkpoint's goes on"
    if name in _BEGINNING:
        return "ignored", "the weights are the checkpoint's"
    if name == "run.max_minutes" and minutes_count:
        return "used", ""
    if keep_schedule and name in _LENGTH:
        return "ignored", f"the length is the checkpoint's; {new}"
    if keep_schedule and (name in _SAVED or name.startswith("schedule.")):
        return "ignored", f"the checkpoint's goes on; {new}"
    return "used", ""


def refuse(found: Iterable[Change]) -> None:
    """Raises BadInput for the changes that are refused."""
    problems = [f"{change}; resume with the setting of before, or begin a new run with another --run.name"
                for change in found if change.verdict == "refused"]  # fmt: skip
    if problems:
        raise BadInput(problems)


def in_force(settings: Mapping, found: Iterable[Change]) -> dict:
    """The settings of a start with the values of before where it ignores its own."""
    kept = {group: dict(entries) for group, entries in settings.items()}
    for change in found:
        if change.verdict == "ignored":
            group, _, key = change.key.partition(".")
            kept[group][key] = change.before
    return kept


def _shown(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    text = " ".join(text.split()) or '""'
    return text if len(text) <= 80 else f"{text[:77]}..."
