"""Low-rank adapters on the attention of a vision transformer, by `peft`; its own weights stay as they are.

Hu et al., "LoRA: low-rank adaptation of large language models", ICLR 2022, arXiv 2106.09685. Adapters exist while a
detector trains, and in its checkpoints; for all other uses they are merged, which needs no `peft`.
"""

import copy
import re
from collections.abc import Mapping

from torch import Tensor, nn

from toolkit.errors import BadInput
from toolkit.imports import import_extra

_STEMS = {"patch_embed", "embeddings"}  # what a vision transformer begins with: timm's name, transformers'
_IN_ATTENTION = re.compile(r"(^|\.)(attn|attention)\.")
_OF_ADAPTER = re.compile(r"\.(base_layer|lora_[AB]\.default)(?=\.)")
_BASE, _A, _B = ".base_layer.weight", ".lora_A.default.weight", ".lora_B.default.weight"


def add_adapters(detector: nn.Module, rank: int, alpha: float) -> None:
    """Gives every linear layer in the attention of the detector's vision transformer an adapter, in place, and freezes
    the rest of the transformer: its layers compute with W + alpha / rank * B A, where A and B are learned. B starts at
    0.

    Args:
        rank: of the adapters, the rows of A and columns of B; 0: there are none.

    Raises:
        BadInput: a rank below 0, an alpha that is not above 0; the detector has no vision transformer; `peft` is not
            installed.
    """
    if not rank:
        return
    if rank < 0 or alpha <= 0:
        numbers = f"model.lora_rank is {rank}, model.lora_alpha {alpha}"
        raise BadInput(f"{numbers}; expected a rank of at least 0 and an alpha above 0")
    vits = [module for module in detector.modules() if _STEMS & {name for name, _ in module.named_children()}]
    layers = {vit: names for vit in vits if (names := _projections(vit))}
    if not layers:
        options = getattr(detector, "options", {})
        on = " on ".join(str(options[key]) for key in ("architecture", "backbone") if options.get(key))
        raise BadInput(
            f"model.lora_rank {rank}: {on or 'the detector'} has no vision transformer whose attention could have "
            "adapters; set it to 0, or choose such a backbone"
        )
    peft = import_extra("peft", "adapters", "adapters (model.lora_rank)")
    for vit, names in layers.items():
        peft.inject_adapter_in_model(peft.LoraConfig(r=rank, lora_alpha=alpha, target_modules=names), vit)
        for module in vit.modules():
            if hasattr(module, "qkv_bias_separate"):  # of timm's EVA and BEiT, which else pass by the layer's forward
                module.qkv_bias_separate = True
        for name, parameter in vit.named_parameters():
            if name.endswith("detection_tokens"):  # the queries of YOLOS
                parameter.requires_grad_(True)


def _projections(vit: nn.Module) -> list[str]:
    return [name for name, m in vit.named_modules() if isinstance(m, nn.Linear) and _IN_ATTENTION.search(name)]


def base_name(name: str) -> str:
    """The name of a parameter without adapters, or of that which an adapter is for."""
    return _OF_ADAPTER.sub("", name)


def merged(tensors: Mapping[str, Tensor], alpha: float) -> dict[str, Tensor]:
    """A state dict without adapters, under the names of a detector without them; alpha: as of `add_adapters`."""
    plain = {}
    for name, tensor in tensors.items():
        layer = name.removesuffix(_BASE)
        if layer + _A in tensors and layer != name:
            a, b = tensors[layer + _A], tensors[layer + _B]
            tensor = tensor + (b @ a) * (alpha / len(a))
        if not name.endswith((_A, _B)):
            plain[base_name(name)] = tensor
    return plain


def without_adapters(detector: nn.Module) -> nn.Module:
    """A copy with its adapters merged; the detector itself where it has none."""
    layers = [name.removesuffix(".base_layer") for name, _ in detector.named_modules() if name.endswith(".base_layer")]
    if not layers:
        return detector
    plain = copy.deepcopy(detector)
    for name in layers:
        parent, _, leaf = name.rpartition(".")
        setattr(plain.get_submodule(parent), leaf, plain.get_submodule(name).base_layer)
    plain.load_state_dict(merged(detector.state_dict(), detector.options["lora_alpha"]))
    plain.options = {**detector.options, "lora_rank": 0}
    return plain
