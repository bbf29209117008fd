"""Compares the tensors of a file with those of a model, by name and shape."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from toolkit.base.text import first_names

MAX_NAMED = 4  # tensors of a kind in a message


@dataclass
class Difference:
    """The difference between the tensors of a file and those of a model; false if there is none.

    Attributes:
        missing: names of the model's tensors that the file does not have.
        unused: names of the file's tensors that the model does not have.
        of_another_shape: names that both have, with both shapes.
    """

    missing: list[str]
    unused: list[str]
    of_another_shape: list[str]

    def __len__(self) -> int:
        return len(self.missing) + len(self.unused) + len(self.of_another_shape)

    def __str__(self) -> str:
        """Format it, as `2 missing: stem.weight, stem.bias; 1 of another shape: head.bias (4,) instead of (3,)`."""
        kinds = {
            "missing": self.missing,
            "unused": self.unused,
            "of another shape": self.of_another_shape,
        }
        named = {kind: first_names(names, MAX_NAMED) for kind, names in kinds.items() if names}
        return "; ".join(f"{len(kinds[kind])} {kind}: {names}" for kind, names in named.items())


def difference(
    model: Mapping[str, Tensor], file: Mapping[str, Tensor], optional: str = "^$", needless: str = "^$"
) -> Difference:
    """Compare the tensors of a file with the state dict of a model.

    Args:
        optional: pattern of the names of tensors that the file may lack. It may always lack empty ones.
        needless: pattern of the names of tensors that the model may lack.
    """
    missing = []
    of_another_shape = []
    for name, tensor in model.items():
        if name in file:
            if file[name].shape != tensor.shape:
                of_another_shape.append(f"{name} {tuple(file[name].shape)} instead of {tuple(tensor.shape)}")
        elif tensor.numel() and not re.search(optional, name):
            missing.append(name)
    unused = [name for name in file if name not in model and not re.search(needless, name)]
    return Difference(missing, unused, of_another_shape)
