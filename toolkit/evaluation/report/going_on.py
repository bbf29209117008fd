"""The command that continues a run that has ended."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path


def flags_that_go_on(ended_by: Sequence[str], config: Mapping, step: int, epochs: int) -> list[str]:
    """The flags with which a run that has ended trains for as long again.

    Args:
        ended_by: names of settings, see `toolkit.runs.status`; empty: it is not known, and every limit that would be in
            the way is raised.
        config: the settings in force. step, epochs: optimizer steps made, and epochs begun.
    """
    run, patience = config.get("run", {}), config.get("eval", {}).get("early_stopping_patience")
    flags = ["--run.resume", "latest"]
    if "eval.early_stopping_patience" in ended_by and patience:
        flags += ["--eval.early_stopping_patience", f"{2 * patience}"]
        if len(ended_by) == 1:  # what is left of its length is enough
            return flags
    flags += ["--run.resume_schedule", "new"]
    for key, made in (("epochs", epochs), ("max_steps", step)):
        if run.get(key) and run[key] < 2 * made:
            flags += [f"--run.{key}", f"{2 * made}"]
    if run.get("max_minutes"):
        flags += ["--run.max_minutes", f"{2 * run['max_minutes']:g}"]
    return flags


def command_that_goes_on(flags: Sequence[str], command_line: Sequence[str], config_file: Path) -> str:
    """For a shell. command_line: that of the run; where no script began it, as in a notebook, the flags alone are told.

    config_file: the settings in force.
    """
    script = Path(command_line[0]) if command_line else Path()
    if script.suffix != ".py" or script.stem == "ipykernel_launcher":
        return shlex.join(flags)
    return shlex.join(["accelerate", "launch", str(script), "--config", str(config_file), *flags])
