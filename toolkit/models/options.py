"""The base of detector settings: one dataclass per architecture, beside the detector, with the published values."""

from dataclasses import dataclass, field, fields
from typing import ClassVar


@dataclass
class DetectorOptions:
    """The settings of every detector: its architecture, its initial weights, and its frozen parts.

    A subclass adds its own settings with their published values. `given` holds the keys that were given when the object
    was made (or set by `only_given`), so that a source of trained weights can replace the others. `inference_only`
    lists the settings, or entries of one as `head_options.effect`, that a trained detector can change.
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
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name in self._given}

    def only_given(self, names) -> "DetectorOptions":
        """Mark these settings, and no others, as given (a parser passes all of them). Returns self."""
        self.__dict__["_given"] = set(names)
        return self
