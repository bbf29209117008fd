"""Class embeddings of relation heads from GloVe (Pennington et al., 2014): text files with one word vector per line."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from toolkit.errors import BadInput


def load_word_vectors(file: str | Path, class_names: Sequence[str], dim: int) -> Tensor:
    """(2 + C, dim) float32: for "nothing before", for background, and for each class.

    A class takes the vector of its name, else that of the longest word in it that the file has, else one drawn from
    N(0, 1), as in Scene-Graph-Benchmark. Raises BadInput for a file that cannot be read or has other widths.
    """
    names = ["start", "__background__", *(name.lower() for name in class_names)]
    wanted = {word for name in names for word in (name, *name.split())}
    found = {}
    try:
        with open(Path(file).expanduser(), encoding="utf-8") as lines:
            for line in lines:
                word, _, numbers = line.partition(" ")
                if word in wanted:
                    found[word] = torch.tensor([float(number) for number in numbers.split()])
    except (OSError, ValueError) as error:
        raise BadInput(f"model.word_vectors: {file} cannot be read as word vectors: {error}") from error
    widths = {len(vector) for vector in found.values()}
    if widths != {dim}:
        raise BadInput(f"model.word_vectors: {file} has vectors of {sorted(widths) or 'none of the classes'}; expected "
                       f"{dim} numbers a word (model.embed_dim)")  # fmt: skip
    vectors = torch.randn(len(names), dim)
    for row, name in enumerate(names):
        word = next((w for w in (name, *sorted(name.split(), key=len, reverse=True)) if w in found), None)
        if word is not None:
            vectors[row] = found[word]
    return vectors


@torch.no_grad()
def start_from_words(head: nn.Module, vectors: Tensor) -> list[str]:
    """Sets the class embeddings of a head; returns their names. Those of label decoders know "nothing before" too."""
    rows = {"embed_in": vectors[1:], "embed_out": vectors[1:], "embed": vectors}
    changed = []
    for name, module in head.named_modules():
        own = rows.get(name.rpartition(".")[2]) if isinstance(module, nn.Embedding) else None
        if own is not None:
            module.weight.copy_(own)
            changed.append(name)
    return changed
