"""What Conditional, Deformable, DAB and RF-DETR share besides their criterion: decoding of the outputs."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers import ConditionalDetrImageProcessor

from toolkit.models.detr.base import TransformersDetector
from toolkit.models.detr.detr_criterion import count_objects

PRIOR = 0.01  # probability that the class heads start from


class FocalDetector(TransformersDetector):
    """A detector with a `FocalCriterion` as `set_loss`."""

    processor_class = ConditionalDetrImageProcessor

    @property
    def groups(self) -> int:
        """Groups of queries that train side by side; one detects."""
        return 1

    def denominators(self, targets: Sequence[Mapping]) -> dict[str, float]:
        """This batch's number of boxes (once per group of queries), from CPU targets; crowd regions do not count."""
        return {"boxes": float(sum(count_objects(targets)) * self.groups)}

    def criterion(self, outputs: Mapping[str, Tensor], targets: Sequence[Mapping], denominators: Mapping):
        """Losses and metrics `(losses, metrics)` of `forward`'s outputs; see `FocalCriterion.forward`."""
        return self.set_loss(outputs, targets, denominators, self.groups)


@torch.no_grad()
def start_heads_(class_head: nn.Linear, box_head: nn.Module) -> None:
    """Heads as all of these papers start them: PyTorch's default, scores at `PRIOR`, boxes at their reference."""
    class_head.reset_parameters()
    nn.init.constant_(class_head.bias, -math.log((1 - PRIOR) / PRIOR))
    for layer in box_head.layers:
        layer.reset_parameters()
    nn.init.zeros_(box_head.layers[-1].weight)
    nn.init.zeros_(box_head.layers[-1].bias)


def inverse_sigmoid(fractions: Tensor, eps: float = 1e-5) -> Tensor:
    """Logits of values in [0, 1], finite at both ends (as transformers and the originals clamp them)."""
    fractions = fractions.clamp(0, 1)
    return torch.log(fractions.clamp(min=eps) / (1 - fractions).clamp(min=eps))
