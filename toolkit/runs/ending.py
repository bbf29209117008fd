"""Why a training ended, and the command that goes on with it.

What ends a training is named by its setting, such as "run.max_minutes": `Training.ended_by` knows it, `status.json`
keeps it, and the report reads it there.
"""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

ENDINGS = {
    "run.epochs": "all epochs are over",
    "run.max_steps": "all steps are made",
    "run.max_minutes": "the minutes are used up",
    "eval.early_stopping_patience": "so many evaluations in a row were not better than the best one",
    "schedule.max_decays": "the learning rate has fallen so many times",
}


def in_words(ended_by: Sequence[str]) -> str:
    """"training ended by run.max_minutes (the minutes are used up)"; empty when nothing has ended it."""
    named = [f"{key} ({ENDINGS[key]})" if key in ENDINGS else str(key) for key in ended_by]
    return f"training ended by {' and '.join(named)}" if named else ""


def flags_that_go_on(ended_by: Sequence[str], config: Mapping, step: int, epochs: int) -> list[str]:
    """The flags with which a run that has ended trains for as long again.

    Args:
        ended_by: names of settings; empty: it is not known, and every limit that would be in the way is raised.
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
