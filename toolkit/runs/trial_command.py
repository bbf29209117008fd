"""Short trial trainings that measure a setting: the command that starts one, and its settings."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from toolkit.errors import BadInput
from toolkit.files import write_text_atomic

# Nothing but steps: no evaluation, checkpoint or tracker, and no settings that go by the length of the training.
STEPS_ALONE = {
    "run.max_minutes": "null", "run.log_every": 1, "run.eval_every": 0, "run.save_every": 0, "run.tracker": "none",
    "run.resume": "never", "run.on_nonfinite": "stop", "run.epochs": 100_000, "data.plain_epochs": 0,
    "eval.before_training": "false", "run.export": "false",
}  # fmt: skip


def steps_alone(script: Path, arguments: Sequence[str], folder: Path, steps: int, settings: Mapping) -> list[str]:
    """Words that train `steps` steps in the run folder `folder` with `settings` on top of the `arguments`."""
    place = {"run.output_dir": folder.parent, "run.name": folder.name, "run.max_steps": steps}
    flags = [f"--{key}={value}" for key, value in {**STEPS_ALONE, **place, **settings}.items()]
    return [sys.executable, str(script), *arguments, *flags]


def resolved_settings(script: Path, arguments: Sequence[str]) -> dict:
    """The settings that a script has with these arguments. Raises BadInput with what it says against them."""
    command = [sys.executable, str(script), *arguments, "--print_config"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise BadInput((ended.stderr or ended.stdout).strip() or f"{script} ended with {ended.returncode}")
    return yaml.safe_load(ended.stdout)


def write_settings(path: Path, settings: Mapping, remarks: Sequence[str]) -> None:
    """A file for `--config`, with why its values are what they are."""
    text = "".join(f"# {remark}\n" for remark in remarks) + yaml.safe_dump(dict(settings), sort_keys=False)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_text_atomic(Path(path), text)
