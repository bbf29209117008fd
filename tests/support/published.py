"""Published weights as the tests have them: names and shapes of the publisher's own program, numbers by formula.

`tests/assets/weights/*.npz` were computed with the programs themselves, small ones of each kind: `names` (JSON, name to
shape) and what they predicted for `pixels(...)` with `numbers(...)` as weights.
"""

import json
import re
import zlib

import numpy as np
import torch
from places import ASSETS

from toolkit.detectors.detr.sizes import DEIMV2_SIZES, ECDET_SIZES
from toolkit.detectors.detr.weights_detr import DETR
from toolkit.detectors.yolov3 import weights_darknet as darknet
from toolkit.models.weights.names import renamed

FOLDER = ASSETS / "weights"


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


def narrowed(entries: dict, width: int, ffn_dims: tuple[int, int], **others) -> dict:
    """A published size with other widths, of encoder and decoder and of their feed-forward layers."""
    levels = entries["num_feature_levels"]
    backbone = entries["backbone_config"] | others.pop("vit", {})
    maps = entries["encoder_in_channels"] if backbone["model_type"] == "hgnet_v2" else [width] * levels
    widths = {
        "encoder_in_channels": maps,
        "encoder_hidden_dim": width,
        "encoder_ffn_dim": ffn_dims[0],
        "d_model": width,
        "decoder_ffn_dim": ffn_dims[1],
        "decoder_in_channels": [width] * levels,
    }
    return entries | widths | others | {"backbone_config": backbone}


def vit(width: int, ffn: int, heads: int) -> dict:
    return {"hidden_size": width, "intermediate_size": ffn, "num_attention_heads": heads}


THREE_LAYERS = {"num_hidden_layers": 3, "out_indices": [2, 3]}
SMALL_DEIMV2 = {
    "atto": narrowed(DEIMV2_SIZES["atto"], 48, (64, 64)),
    "n": narrowed(DEIMV2_SIZES["n"], 48, (64, 64)),
    "s": narrowed(
        DEIMV2_SIZES["s"], 64, (64, 96), decoder_layers=2, spatial_tuning_adapter_inplanes=8, vit=vit(64, 256, 1)
    ),
    "x": narrowed(
        DEIMV2_SIZES["x"], 48, (64, 96), decoder_layers=2, spatial_tuning_adapter_inplanes=8, vit=vit(128, 512, 2)
    ),
}
SMALL_ECDET = {
    "s": narrowed(ECDET_SIZES["s"], 64, (48, 48), decoder_layers=3, vit=vit(64, 256, 1) | THREE_LAYERS),
    "l": narrowed(ECDET_SIZES["l"], 32, (48, 40), decoder_layers=3, vit=vit(64, 384, 2) | THREE_LAYERS),
}


def with_small_sizes(monkeypatch) -> None:
    """Let published sizes be as narrow as the models that the numbers in `tests/assets/weights` are of."""
    for sizes, small in ((DEIMV2_SIZES, SMALL_DEIMV2), (ECDET_SIZES, SMALL_ECDET)):
        for size, entries in small.items():
            monkeypatch.setitem(sizes, size, entries)


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


def published_rcnn(name: str) -> tuple[dict, dict]:
    """`published` of maskrcnn-benchmark, with weights that keep its features and boxes small, and its anchors."""
    state, arrays = published(name)
    for key in state:
        if "cell_anchors" in key:
            state[key] = torch.from_numpy(arrays[f"cell{key[-1]}"])
        for part, scale in (("bbox_pred", 0.1), ("bn3.weight", 0.2), ("stem.conv1", 0.02)):
            if part in key:
                state[key] = state[key] * scale
    return state, arrays


def not_taken(theirs: dict, ours: dict) -> list[str]:
    """Names of the publisher's tensors whose numbers are not among ours. The numbers are random, so they tell which
    tensor is which; queries, keys and values of one matrix are three of ours, as two projections are of SwiGLU's."""
    taken = {tensor.numpy().tobytes() for tensor in ours.values()}
    joint = {".in_proj_": 3, ".qkv.": 3, ".w12.": 2}
    counts = {name: next((joint[part] for part in joint if part in name), 1) for name in theirs}
    parts = {name: t.chunk(counts[name]) if counts[name] > 1 else [t] for name, t in theirs.items()}
    return [name for name, each in parts.items() if not all(part.numpy().tobytes() in taken for part in each)]


def as_detr_saves_it(state: dict) -> dict:
    """Tensors of our DETR as facebookresearch/detr names them."""
    theirs = renamed(state, [(ours, name) for name, ours in DETR.names])
    joint = {name for name in theirs if re.search(r"\.q_proj\.", name)}
    for name in joint:
        parts = [theirs.pop(name.replace(".q_proj.", f".{which}_proj.")) for which in "qkv"]
        theirs[name.replace(".q_proj.", ".in_proj_")] = torch.cat(parts)
    return theirs


def as_darknet_writes_it(state: dict) -> np.ndarray:
    """The numbers of our YOLOv3 in the order of Darknet's file."""
    parts = []
    for conv, norm, _ in [*darknet.backbone_layers(), *darknet.head_layers(len(state["predictions.0.bias"]) // 3 - 5)]:
        parts += [state[f"{norm}.{leaf}"] for leaf in darknet.NORM] if norm else [state[f"{conv}.bias"]]
        parts.append(state[f"{conv}.weight"].flatten())
    return torch.cat(parts).numpy()
