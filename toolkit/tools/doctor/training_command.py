"""Makes the command that trains on inspected data, with the role of each split and the recipe that suits this machine.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from toolkit.base.distributed import default_device
from toolkit.base.files import ROOT, parse_yaml, shown_path
from toolkit.data.layout import SPLIT_NAMES, UNSPLIT, split_in_name, split_of
from toolkit.data.pipeline import processor_size
from toolkit.run.settings import DataConfig
from toolkit.tools.doctor.inspection import Inspection
from toolkit.tools.doctor.tile_advice import MEASURED_EMPTY_SHARE, nominal_hw

DEFAULT_SIZE_PX = 640  # of images, where a settings file says none
WITH_MASKS = "train_faster_rcnn"  # the script whose settings files for own data can train masks

# Words of the names of files and folders that do not say what the data are.
UNTELLING = {"annotation", "annotations", "image", "images", "instances", "label", "labels", "trainval", UNSPLIT}
UNTELLING.update({"data", "dataset", "project"}, *SPLIT_NAMES.values())


@dataclass(frozen=True)
class Source:
    """A source of data that the user gave: a folder, an annotation file, or the split of a named data set.

    Attributes:
        given: the text that the user gave.
        splits: names of the splits in a folder; () for anything else.
    """

    given: str
    splits: tuple[str, ...] = ()

    @property
    def is_split(self) -> bool:
        """Whether this is a folder with named splits, and not a single split (a file, or a folder without splits)."""
        return bool(self.splits) and self.splits != (UNSPLIT,)

    @property
    def split(self) -> str | None:
        """The split that the name of the file or folder says, such as "train"; for a file whose name says none, the
        split that the name of its folder says; None if that says none either."""
        path = Path(self.given).expanduser().absolute()
        of_folder = split_of(path.parent.name) if path.is_file() else None
        return split_in_name(path.name) or of_folder


@dataclass(frozen=True)
class Choice:
    """The choice of the training, validation and test data.

    Attributes:
        settings: settings by key that name these data.
        unused: the sources or splits that are not used.
    """

    settings: dict[str, str]
    unused: tuple[str, ...] = ()


def command_for(
    sources: Sequence[Source],
    inspection: Inspection,
    reading: Mapping[str, object],
    script: str | None,
    masks: bool = False,
    tile: int | None = None,
) -> str:
    """Return the command that trains on these data on this machine, or a sentence that says why there is none.

    Args:
        sources: the data that the user gave.
        inspection: the inspection of these data.
        reading: further settings of the group `data` by key; None values are left out.
        script: name of the training script; None: the script that suits this machine.
        masks: whether to train masks too.
        tile: side of the tiles in pixels that pay for the training data; None: none do.
    """
    if masks and script not in (None, WITH_MASKS):
        return f"the settings file of {script} for own data trains only boxes; that of {WITH_MASKS} trains masks too"
    kinds = {finding.kind for finding in inspection.findings if finding.severity == "error"}
    if "background" in kinds:
        return "almost no image has an object: find out where the labels are before training on these data"
    if kinds - {"record"}:
        return "no training starts on these data before the errors are fixed"
    choice = choose(sources, has_name=reading.get("name") is not None)
    if isinstance(choice, str):
        return choice
    settings = choice.settings | {f"data.{key}": str(value) for key, value in reading.items() if value is not None}
    if kinds:
        settings["data.on_error"] = "drop"
    if masks:
        script = WITH_MASKS
        settings["model.masks"] = "true"
    if tile and script != "train_sgg":
        settings["data.tile"] = str(tile)
        settings["data.tile_empty"] = str(MEASURED_EMPTY_SHARE)
    program, recipe, why = recipe_for(script)
    if "data.image_size" in settings and _data_of(recipe).get("scales"):
        settings["data.scales"] = "[]"  # which would count instead of the size
    words = ["accelerate", "launch", program, "--config", recipe]
    for key, value in settings.items():
        words += [f"--{key}", value]
    name = "shapes" if reading.get("format") == "shapes" else reading.get("name")
    words += ["--run.name", _name_of_run(sources, name)]
    reasons = [why] if why else []
    if settings.get("data.val") == "0.2":
        reasons.append(_held_out(settings))
    brackets = f" ({'; '.join(reasons)})" if reasons else ""
    lines = [f"not used by this command: {', '.join(choice.unused)}"] if choice.unused else []
    return "\n".join([*lines, f"to train on them{brackets}:", shlex.join(words)])


def choose(sources: Sequence[Source], has_name: bool = False) -> Choice | str:
    """Choose the data for training, validation and test; return a sentence that says why if no choice is possible.

    has_name: the sources are splits of a named data set, not files.
    """
    if all(source.is_split for source in sources) or len(sources) == 1 and sources[0].splits:
        return _of_folders(sources)
    if any(source.is_split for source in sources):
        return "to train on them, give only folders of splits, or only files"
    by_split: dict[str | None, list[str]] = {}
    for source in sources:
        split = split_in_name(source.given) if has_name else source.split
        by_split.setdefault(split, []).append(source.given)
    unnamed = by_split.pop(None, [])
    if "train" not in by_split and unnamed:
        by_split["train"] = [unnamed.pop(0)]
    if "train" not in by_split:
        return f"no training data: there is only {', '.join(by_split)} (--data.train FILE says what trains)"
    settings = {
        "data.train": _flag_value(by_split["train"]),
        "data.val": _flag_value(by_split.get("val", ["0.2"])),
    }
    tests = by_split.get("test", [])
    if tests:
        settings["eval.test_split"] = tests[0]
    return Choice(settings, (*tests[1:], *unnamed))


def _of_folders(folders: Sequence[Source]) -> Choice | str:
    everywhere = [split for split in folders[0].splits if all(split in folder.splits for folder in folders)]
    trains = next((split for split in ("train", "trainval", UNSPLIT) if split in everywhere), None)
    if trains is None:
        named = ", ".join(dict.fromkeys(split for folder in folders for split in folder.splits))
        return f"no training data: there is only {named} (--data.train NAME --data.val NAME say which are which)"
    settings = {"data.path": _flag_value([folder.given for folder in folders])}
    if "val" not in everywhere:
        settings["data.val"] = "0.2"
    if "test" in everywhere:
        settings["eval.test_split"] = "test"
    used = {trains, "trainval"} | {"val", "test"}.intersection(everywhere)
    unused = []
    for folder in folders:
        where = f" of {folder.given}" if len(folders) > 1 else ""
        unused += [f"{split}{where}" for split in folder.splits if split not in used]
    return Choice(settings, tuple(unused))


def _held_out(settings: Mapping[str, str]) -> str:
    """Say what is used for validation if the data have no split for it, and what else could be."""
    text = "no split validates: a fifth of the training data is held out"
    test = settings.get("eval.test_split")
    if test:
        text += f"; to validate on the test split, as papers on Pascal VOC do: --data.val {shlex.quote(test)}"
    return text


def _flag_value(values: Sequence[str]) -> str:
    return values[0] if len(values) == 1 else f"[{', '.join(values)}]"


def size_of_recipe(config: str) -> dict[str, int]:
    """Return what a settings file for own data resizes images to, in the format of `processor_size`."""
    data = _data_of(config)
    side = data.get("image_size", DEFAULT_SIZE_PX)
    return processor_size(side, data.get("scales", []), data.get("max_size", DataConfig.max_size))


def _data_of(config: str) -> dict:
    """Return the group `data` of a settings file."""
    return (parse_yaml(Path(config).read_text(encoding="utf-8")) or {}).get("data", {})


def tile_of(inspection: Inspection, size: Mapping[str, int]) -> int | None:
    """Return the side of the tiles that pay for the training data, by the findings; None if none do."""
    splits = [split for finding in inspection.findings if finding.kind == "tiles" for split in finding.items]
    pays = any(split_of(split) not in ("val", "test") for split in splits)
    return max(nominal_hw(size)) if pays else None


def _name_of_run(sources: Sequence[Source], name: object) -> str:
    """Return the name of the data: `name`, or that of the first source, or of the nearest folder around it that says
    more than "train" or "annotations" do."""
    path = Path(sources[0].given).expanduser().resolve()
    own = path.name if path.is_dir() else path.stem.removesuffix(".coco")
    names = [own, *(folder.name for folder in path.parents)] if name is None else [str(name)]
    telling = next((each for each in names if not UNTELLING.issuperset(_words(each))), "mine")
    return re.sub(r"[^\w.-]+", "_", telling)


def _words(name: str) -> list[str]:
    return re.findall(r"[^\W\d_]+", name.lower())


def recipe_for(asked: str | None) -> tuple[str, str, str]:
    """Return the training script, its settings file for this machine, and the reason for the choice, or "".

    Paths are relative to the current folder if they lie below it.

    asked: name of the script; None: RT-DETR-v2 from trained weights; or, without a GPU or a network to download these
    weights, a small Faster R-CNN, which finds most after minutes of training (docs/results.md).
    """
    from huggingface_hub import constants

    from toolkit.models.weights.pretrained import hub_answers

    why = ""
    if default_device().type == "cpu":
        why = "no GPU: a small detector, from random weights"
    elif constants.HF_HUB_OFFLINE or not hub_answers():
        why = "no network for trained weights: a small detector, from random ones"
    script = asked or ("train_faster_rcnn" if why else "train_detr")
    folder = ROOT / "configs" / script.removeprefix("train_")
    small = folder / "own_data_cpu.yaml"
    config = small if why and small.is_file() else folder / "own_data.yaml"
    if config != small:
        why = "trained weights are downloaded once"
    program = ROOT / "scripts" / f"{script}.py"
    return shown_path(program), shown_path(config), why
