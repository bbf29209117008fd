"""Detectors by name: the base of their settings, their classes, and `build_detector`.

Each architecture has one dataclass of settings, in the detector's folder, with the published values. `build_detector`
is the one place where training, evaluation and prediction build a model.
"""

import inspect
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from toolkit import index
from toolkit.base.errors import BadInput
from toolkit.base.imports import import_lightly, importing, may_import
from toolkit.base.text import did_you_mean, escaped, shown

if TYPE_CHECKING:
    from toolkit.models.detector import Detector


@dataclass
class DetectorOptions:
    """The settings of every detector: its architecture, its initial weights, and its frozen parts.

    A subclass adds its own settings with their published values. `given` holds the settings that were given when the
    object was made (or marked by `only_given`), so that a source of trained weights can replace the others.
    `inference_only` lists the settings, or entries of a setting such as `head_options.effect`, that can be changed in a
    trained detector.
    """

    inference_only: ClassVar[tuple[str, ...]] = ()

    architecture: str = ""
    """Detector: a name of this toolkit, or `module:Class` of your own, in a file beside the script or on PYTHONPATH."""
    pretrained: str | None = None
    """Pretrained weights to start from: hub name, transformers folder, `final/` folder, run folder, checkpoint, or a
    publisher's file. Model settings that are not given are taken from it, and rows of classes are matched by name. A
    resumed run keeps its own weights."""
    pretrained_backbone: bool | str = False
    """Start from timm's pretrained backbone weights (downloaded once), or from a file of them; not used with
    `model.pretrained`."""
    fresh_prefixes: list[str] = field(default_factory=list)
    """Modules or parameters, by prefix of their names, to initialise from scratch in spite of `model.pretrained`: box
    heads, for example, when objects are much smaller or larger than in the source's data."""
    freeze_prefixes: list[str] = field(default_factory=list)
    """Modules or parameters, by prefix of their names, to freeze; frozen modules stay in evaluation mode."""

    def __new__(cls, *args, **given):
        self = super().__new__(cls)
        names = [field.name for field in fields(cls)]
        self.__dict__["_given"] = {*names[: len(args)], *given}
        return self

    @property
    def given(self) -> dict:
        """The settings that were given, by name, in the order of the dataclass."""
        names = [field.name for field in fields(self) if field.name in self._given]
        return {name: getattr(self, name) for name in names}

    def only_given(self, names) -> "DetectorOptions":
        """Mark the settings `names`, and no others, as given, and return self; for a parser, which passes all settings.
        """
        self.__dict__["_given"] = set(names)
        return self


def detector_class(architecture: str) -> type["Detector"]:
    """Return the class of a detector, given by a name in `toolkit.index.DETECTORS` or as `module:Class`.

    Raises:
        BadInput: the name, module or class is unknown; the class is not a `Detector`, or its `Options` are not a
            dataclass below `DetectorOptions`; or its import is not trusted, because only a file names it, see
            `toolkit.base.imports`.
    """
    if architecture in index.DETECTORS:
        with importing():
            import_lightly("timm")
            return index.load(index.DETECTORS[architecture][0])
    if ":" not in str(architecture):
        hint = did_you_mean(str(architecture), index.DETECTORS, written=repr)
        expected = f"no `module:Class` of your own{hint}"
        raise BadInput(f"model.architecture: {architecture!r} is none of {', '.join(index.DETECTORS)}, and {expected}")
    if not may_import(architecture):
        raise BadInput(
            f"model.architecture: {escaped(architecture)} is a class that a file names, and importing it runs its "
            "code; if you trust it, add --trust, in training name it yourself (as --model.architecture, below a scene "
            "graph in --model.detector_options), in Python import its module first"
        )
    folder = str(Path.cwd())
    if folder not in sys.path:  # only for this import: files there must not replace packages
        sys.path.append(folder)
    try:
        cls = index.load(architecture)
    except (ImportError, AttributeError, ValueError) as error:
        raise BadInput(
            f"model.architecture: {architecture} cannot be imported: {error}. Expected `module:Class` with the module "
            "in this folder, in the script's folder or on PYTHONPATH"
        ) from error
    from toolkit.models.detector import Detector  # torch, for which `--help` need not wait

    if not (isinstance(cls, type) and issubclass(cls, Detector)):
        raise BadInput(f"model.architecture: {architecture} is not a subclass of toolkit.models.detector.Detector")
    _check_options(architecture, cls.Options)
    return cls


def _check_options(architecture: str, options: object) -> None:
    """Raise BadInput if the settings of a detector of a user's own are not a dataclass below `DetectorOptions`."""
    name = getattr(options, "__name__", shown(options))
    is_below = isinstance(options, type) and issubclass(options, DetectorOptions)
    if is_below and ("__dataclass_fields__" in vars(options) or not inspect.get_annotations(options)):
        return  # without annotations there is nothing to decorate
    has = "is not a dataclass" if is_below else "is not a subclass of toolkit.models.DetectorOptions"
    raise BadInput(
        f"model.architecture: the Options of {architecture}, {name}, {has}; write `@dataclass` and "
        f"`class {name}(DetectorOptions):`, with `from toolkit.models import DetectorOptions`"
    )


def options_class(architecture: str) -> type[DetectorOptions]:
    """Return the dataclass of a detector's settings. For `architecture` and BadInput see `detector_class`."""
    if architecture in index.DETECTORS:
        return index.load(index.DETECTORS[architecture][1])
    return detector_class(architecture).Options


def build_detector(architecture: str, *, class_names: Sequence[str], **settings) -> "Detector":
    """Build a detector. Its attribute `options` holds all settings from which the same detector can be built again.

    Args:
        architecture: a name in `toolkit.index.DETECTORS`, or `module:Class`.
        class_names: one name per class, in the order of the labels.
        settings: values of the detector's options as plain numbers, strings and lists; None: not given. Also the other
            arguments of the detector's class, such as `source_config` of the DETR family and `predicates` of scene
            graphs.

    Raises:
        BadInput: the architecture is unknown; there are no classes; an option does not exist or cannot be met (unknown
            backbone, no weights, ...); or the class does not keep the contract, see `check_contract`.
    """
    from toolkit.models.detector import check_contract

    if not class_names:
        raise BadInput("the data names no classes; a detector needs at least one.")
    options_type = options_class(architecture)
    cls = detector_class(architecture)
    keywords = [name for name in inspect.signature(cls).parameters if name not in ("class_names", "options")]
    extra = {name: value for name, value in settings.items() if name in keywords}
    values = {name: value for name, value in settings.items() if name not in keywords and value is not None}
    check_keys(architecture, options_type, values)
    options = options_type(**({"architecture": architecture} | values))
    detector = cls(class_names, options, **extra)
    detector.options = {**asdict(options), **extra, "pretrained_backbone": False}
    check_contract(detector)
    detector.options = detector.resolved_options()  # options that were not given may come from a source
    return detector


def check_keys(architecture: str, options_type: type[DetectorOptions], keys: Iterable[str]) -> None:
    """Raise BadInput if any of the settings `keys` does not exist in `options_type`, with the nearest name of each."""
    names = [field.name for field in fields(options_type)]
    problems = []
    for key in [key for key in keys if key not in names]:
        hint = did_you_mean(key, names, written="model.{}".format, otherwise=f"it has {', '.join(names)}")
        problems.append(f"{architecture} has no setting model.{key}{hint}")
    if problems:
        raise BadInput(problems)
