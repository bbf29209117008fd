"""Published weights as the tests have them: names and shapes of the publisher's own program, numbers by formula.

`tests/data/weights/*.npz` were computed with the programs themselves, small ones of each kind: `names` (JSON, name to
shape) and what they predicted for `pixels(...)` with `numbers(...)` as weights.
"""

import json
import zlib
from pathlib import Path

import numpy as np
import torch

FOLDER = Path(__file__).parent / "data" / "weights"


def numbers(name: str, shape) -> torch.Tensor:
    """Random values of a tensor, of a size that suits what its name says it is, always the same."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    leaf = name.rsplit(".", 1)[-1]
    if leaf == "num_batches_tracked":
        return torch.zeros(tuple(shape), dtype=torch.int64)
    if leaf in ("running_var", "scale"):
        values = rng.uniform(0.5, 1.5, shape)
    elif len(shape) <= 1:
        values = rng.uniform(0.5, 1.5, shape) if leaf in ("weight", "gamma") else 0.1 * rng.standard_normal(shape)
    else:
        values = rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))
    return torch.from_numpy(np.asarray(values, np.float32))


def pixels(*shape) -> torch.Tensor:
    """uint8 images."""
    return torch.from_numpy(np.random.default_rng(7).integers(0, 256, shape, dtype=np.uint8))


def published(name: str, constants=None) -> tuple[dict, dict]:
    """State dict of a publisher's program, and the other arrays of its file. constants: tensors by their last name,
    which are no weights."""
    arrays = dict(np.load(FOLDER / f"{name}.npz"))
    shapes = json.loads(arrays.pop("names").tobytes())
    state = {}
    for key, shape in shapes.items():
        leaf, alone = key.rsplit(".", 1)[-1], key.replace("transformer.decoder.bbox_embed", "bbox_embed")
        alone = alone.replace("transformer.decoder.class_embed", "class_embed")  # heads that two modules share
        state[key] = constants[leaf].clone() if leaf in (constants or {}) else numbers(alone, shape)
    return state, arrays
