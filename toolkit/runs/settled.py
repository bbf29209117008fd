"""Decides precision and compilation of a run, from the settings, the launcher, the resumed run or the hardware."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Settled:
    """What is used, and who decided it.

    precision: no, fp16 or bf16. tf32: as `run.tf32`. compile: as `optim.compile`, never None.
    precision_by, compile_by: a setting, "accelerate launch", "the run so far" or "default".
    """

    precision: str
    precision_by: str
    tf32: bool | None
    compile: bool | str
    compile_by: str

    def __str__(self) -> str:
        tf32 = ", TF32" if self.tf32 else ""
        compiled = f"; torch.compile: {self.compile} ({self.compile_by})"
        return f"precision: {self.precision}{tf32} ({self.precision_by}){'' if self.compile is False else compiled}"


def settle(
    given: Mapping, launched: Mapping, began: Mapping, auto: Callable[[], tuple[str, bool | None, str]]
) -> Settled:
    """The first that has a word on `precision`, and on `compile`: the settings, the launcher, the run that goes on.

    Args:
        given, launched, began: values of `precision`, `tf32` and `compile`; a missing one, or None, says nothing.
            given["precision"] "auto" leaves it to the others, and then to `auto`.
        auto: precision, TF32 and why, by the hardware; called only if it decides.
    """
    precision, by = _first("run.precision", None if given["precision"] == "auto" else given["precision"],
                           launched.get("precision"), began.get("precision"))  # fmt: skip
    tf32 = given["tf32"]
    if by == "the run so far" and tf32 is None:
        tf32 = began.get("tf32")
    if precision is None and given["precision"] == "auto":
        precision, able, why = auto()
        by, tf32 = f"run.precision auto: {why}", able if tf32 is None else tf32
    compile, compile_by = _first("optim.compile", given["compile"], launched.get("compile"), began.get("compile"))
    return Settled(precision or "no", by, tf32, compile or False, compile_by)


def _first(name: str, given: object, launched: object, began: object) -> tuple[object, str]:
    if given is not None:
        unheard = f", not accelerate launch, which says {launched}" if launched not in (None, given) else ""
        return given, f"{name}{unheard}"
    if launched is not None:
        return launched, "accelerate launch"
    return began, "default" if began is None else "the run so far"
