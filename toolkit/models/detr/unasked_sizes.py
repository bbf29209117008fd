"""The forward of transformers' RT-DETR, D-FINE and DEIMv2 without its waits for a GPU.

Between the projection of the feature maps and the selection of queries, transformers copies the sizes of the maps to
the device one by one, and looks up the positives of the denoising queries although their number is known.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class SizesKnown(TorchFunctionMode):
    """Inside, a number is filled in where it would be copied, and `torch.nonzero` finds `positives` rows unasked."""

    def __init__(self, positives: int):
        super().__init__()
        self.positives = positives

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is Tensor.__setitem__ and isinstance(args[2], int | float):
            args[0][args[1]].fill_(args[2])  # places of transformers are integers and slices: this is a view
            return None
        if func is torch.nonzero:
            return torch.nonzero_static(args[0], size=self.positives)
        return func(*args, **(kwargs or {}))


@contextmanager
def sizes_known(model: nn.Module, counts: Sequence[int]) -> Iterator[None]:
    """The forward of `model`, a transformers' model without its loss, gives the same numbers inside.

    counts: objects of each image that denoising queries are made of; none in evaluation.
    """
    most = max(counts, default=0)
    groups = max(1, model.config.num_denoising // most) if most else 0
    with ExitStack() as in_between:

        def begin(*_) -> None:
            in_between.enter_context(SizesKnown(groups * sum(counts)))

        def end(*_) -> None:
            in_between.close()

        hooks = [model.decoder_input_proj[0].register_forward_pre_hook(begin),
                 model.enc_output.register_forward_pre_hook(end)]  # fmt: skip
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
