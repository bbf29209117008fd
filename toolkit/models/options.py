"""The settings of a detector: one dataclass per architecture, beside the detector, with the published values."""

from dataclasses import dataclass, field, fields
from typing import ClassVar


@dataclass
class DetectorOptions:
    """What every detector has: its architecture, the weights that it starts from, and those that stay as they are.

    A subclass adds its own settings with their published values. `given` tells which keys were given when the object
    was made (or set by `only_given`), so that what a source of trained weights says can take the place of the others.
    `inference_only` names the settings, or entries of one as `head_options.effect`, that a trained detector can change.
    """

    inference_only: ClassVar[tuple[str, ...]] = ()

    architecture: str = ""
    """Name of a detector of this toolkit, or `module:Class` of your own, a file beside the script."""
    pretrained: str | None = None
    """Trained weights to start from: hub name, transformers folder, `final/`, run folder or checkpoint. Settings of the
    model that are not given are then the source's; rows of classes of the same name are kept. A resumed run has its
    own."""
    pretrained_backbone: bool | str = False
    """timm's weights for the backbone (downloaded once), or a file of them; not used with `pretrained`."""
    fresh_prefixes: list[str] = field(default_factory=list)
    """Modules or parameters that begin as without `pretrained`, by name or prefix of it: heads of boxes, where objects
    are much smaller or larger than the source has seen."""
    freeze_prefixes: list[str] = field(default_factory=list)
    """Modules or parameters that are not trained, by name or prefix of it; frozen modules stay in evaluation mode."""

    def __new__(cls, *args, **given):
        self = super().__new__(cls)
        names = [each.name for each in fields(cls)]
        self.__dict__["_given"] = {*names[: len(args)], *given}
        return self

    @property
    def given(self) -> dict:
        """The settings that were given, by name, in the order of the dataclass."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name in self._given}

    def only_given(self, names) -> "DetectorOptions":
        """Notes that these settings, and no others, were given: a parser hands over all of them. Returns itself."""
        self.__dict__["_given"] = set(names)
        return self
