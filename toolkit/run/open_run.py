"""Opens a finished or unfinished run, and the script of the run, from only the run folder: for evaluation, prediction,
export and replay."""

import importlib.util
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import Any

from toolkit.base.errors import BadInput
from toolkit.base.files import ROOT, near_names, read_json
from toolkit.base.imports import files_are_trusted
from toolkit.base.text import escaped
from toolkit.data.table import Category
from toolkit.run.checkpoint import Checkpoint, resolve_resume
from toolkit.run.settings_file import (
    REQUIRED_KEYS,
    OptionsOf,
    checked_settings,
    load_config_dict,
    newest_config,
    script_digest,
)

EXPORTED = (".onnx", ".pt2", ".xml")  # what scripts/export.py writes


@dataclass
class Run:
    """A run folder with its settings (`config`), one of its checkpoints, and the classes of the checkpoint."""

    folder: Path
    config: dict
    checkpoint: Checkpoint
    categories: list[Category]

    @property
    def weights_names(self) -> list[str]:
        """The weights that the checkpoint holds: "model" (raw) and, if the run averaged its weights, "ema"."""
        return [name for name in ("model", "ema") if name in self.checkpoint.tensors]


def open_run(path: Path, options_of: OptionsOf) -> Run:
    """Open a run folder with its best checkpoint, else its newest valid one; or a given checkpoint of a run.

    The folder of a run with `run.eval_only` is opened with the checkpoint that the run evaluated.

    Args:
        path: a run folder, or a checkpoint inside one.
        options_of: `toolkit.models.options_class`, which finds the dataclass that the settings of the model are checked
            against.

    Raises:
        BadInput: `path` is neither a run folder nor a checkpoint in one; or the settings in the folder are not valid;
            or no valid checkpoint exists.
    """
    path = Path(path).expanduser()
    if not path.exists():
        raise BadInput(f"{path}: no such run or checkpoint{near_names(path)}")
    folder = run_folder_of(path)
    if path == folder:
        path = folder / "checkpoints" / ("best" if (folder / "checkpoints" / "best").exists() else "")
    config = load_config_dict(newest_config(folder), options_of, needed=REQUIRED_KEYS)
    checkpoint, _ = resolve_resume(str(_evaluated_run(folder, path, config)), folder, of_run=True)
    categories = [Category(**category) for category in checkpoint.categories]
    return Run(folder, config, checkpoint, categories)


def kind_of(source: str | Path) -> str:
    """Return the kind of thing that a path or name refers to; it is decided only here.

    The kinds are "run" (a run folder or a checkpoint), "final" (a model that this toolkit saved), "transformers" (the
    folder of a model of transformers, or a name on the Hugging Face hub), "exported" (a file of scripts/export.py),
    "predictions" (a .json file) and "file" (any other file).

    Raises:
        BadInput: the path does not exist and cannot be a name on the hub, or config.json in the folder cannot be read.
    """
    path = Path(source).expanduser()
    if not path.exists() and not may_be_of_hub(str(source)):
        raise BadInput(f"{source}: no such run, checkpoint, model or file{near_names(path)}")
    if path.suffix in EXPORTED:
        return "exported"
    if path.is_file():
        return "predictions" if path.suffix == ".json" else "file"
    if not path.exists():
        return "transformers"
    if not (path / "config.json").exists():
        return "run"
    return "transformers" if "model_type" in read_json(path / "config.json") else "final"


def may_be_of_hub(name: str) -> bool:
    """Return whether a name has the form `owner/model` of the Hugging Face hub.

    False if the current folder has a folder `owner`: then a path was meant.
    """
    return re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None and not Path(name).parent.is_dir()


def _evaluated_run(folder: Path, path: Path, config: Mapping) -> Path:
    """Return `path`; for a run of `run.eval_only`, which has no checkpoints, what that run evaluated."""
    run = config.get("run", {})
    resumed = Path(str(run.get("resume"))).expanduser()
    empty = not any((folder / "checkpoints").glob("step_*"))
    return resumed if run.get("eval_only") and empty and resumed.exists() else path


def run_folder_of(path: Path) -> Path:
    """Return the run folder that `path` is, or that `path` lies in.

    Raises:
        BadInput: neither `path` nor a folder above it holds a config.yaml.
    """
    for folder in (path, *path.absolute().parents):
        if (folder / "config.yaml").is_file():
            return folder
    expected = "expected a run such as runs/detr, or a checkpoint inside one"
    raise BadInput(f"{path}: not a run folder: neither it nor a folder above it has a config.yaml; {expected}")


def settings_beside(checkpoint: Path, config: Any, options_of: OptionsOf) -> dict:
    """Return the newest settings in the run folder of a checkpoint; an empty dict if that folder is gone.

    Args:
        checkpoint: path of the checkpoint, or of the run folder.
        config: settings object of this start, whose classes say which groups and settings the script has.
        options_of: see `open_run`.

    Raises:
        BadInput: see `checked_settings`.
    """
    try:
        folder = run_folder_of(checkpoint)
    except BadInput:  # its folder was removed, settings and all
        return {}
    groups = {field.name: getattr(config, field.name) for field in fields(config)}
    model = groups.pop("model")

    def options_of_before(architecture: str) -> type | None:
        """Another class of one's own is not imported for a run that will be refused."""
        if architecture == model.architecture:
            return type(model)
        return None if ":" in architecture else options_of(architecture)

    kinds = {name: type(group) for name, group in groups.items()}
    return checked_settings(newest_config(folder), kinds, options_of_before, needed=("model",))


def chosen_weights(run: Run, asked: str | None = None) -> str:
    """Return "model" or "ema", the weights of the checkpoint to use.

    asked: "model" or "ema"; None: "ema" if the run's `eval.metric_for_best` is one of the averaged weights and the
    checkpoint has them, else "model". These are also the weights in `final/`.

    Raises:
        BadInput: the checkpoint does not hold the weights asked for.
    """
    averaged = run.config["eval"]["metric_for_best"].startswith("ema/")
    chosen = asked or ("ema" if averaged and "ema" in run.weights_names else "model")
    if chosen not in run.weights_names:
        raise BadInput(f"--weights {chosen}: {run.checkpoint.path} holds {', '.join(run.weights_names)}")
    return chosen


# ---------------------------------------------------------------- its script


def script_of(config: Any) -> dict | None:
    """Return the `path` of the script of a run and its hash, `sha256`; None if that file does not exist.

    config: the settings object, whose class the script defines.
    """
    file = getattr(sys.modules.get(type(config).__module__), "__file__", None)
    return None if file is None else {"path": str(Path(file).resolve()), "sha256": script_digest(Path(file))}


def open_script(about: Mapping | None) -> tuple[ModuleType | None, str]:
    """Import the script of a run and return its module, and a remark if the script has changed since, else "".

    about: what `script_of` recorded. If that is None, or the file is gone, the module is None and the remark says so.

    Raises:
        BadInput: the script is not one of this project's training scripts, and `--trust` was not given.
    """
    if not isinstance(about, Mapping) or not isinstance(about.get("path"), str):
        return None, "the run had no script of its own: only the detector and its criterion are run again, not its loop"
    path = Path(about["path"])
    if not path.is_file():
        return None, f"{path}, the script of this run, is gone: only the detector and its criterion are run again"
    if path.resolve() not in (ROOT / "scripts").resolve().glob("train_*.py") and not files_are_trusted():
        raise BadInput(
            f"environment.json of the run names {escaped(path, 300)} as its script, none of this project's, which "
            "would be run: look at it, and add --trust if it is yours"
        )
    changed = f"{path} has changed since that run" if script_digest(path) != about.get("sha256") else ""
    return load_script(path, f"replayed_{path.stem}"), changed


def load_script(path: Path, name: str) -> ModuleType:
    """Execute the Python file `path`, wherever it lies, as the module `name`, and return the module."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
