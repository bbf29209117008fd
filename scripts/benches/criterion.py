"""DETR's criterion, forward and backward: this toolkit against transformers' `ForObjectDetectionLoss`."""

from types import SimpleNamespace

import torch
from torch import Tensor
from transformers.loss.loss_for_object_detection import ForObjectDetectionLoss

from toolkit.base.box_ops import cxcywh_to_xyxy
from toolkit.detectors.detr.detr_criterion import DetrCriterion

from .measuring import in_turn, medians

NUM_CLASSES = 91
WEIGHTS = {"loss_ce": 1.0, "loss_bbox": 5.0, "loss_giou": 2.0}
# The values that ForObjectDetectionLoss reads from a DetrConfig, as in the paper.
COSTS = {"class_cost": 1, "bbox_cost": 5, "giou_cost": 2, "bbox_loss_coefficient": 5, "giou_loss_coefficient": 2}
OTHERS = {"num_labels": NUM_CLASSES, "eos_coefficient": 0.1, "auxiliary_loss": True, "decoder_layers": 6}
TRANSFORMERS_CONFIG = SimpleNamespace(**COSTS, **OTHERS)


def bench_criterion(
    batch_size: int = 16,
    num_queries: int = 100,
    num_layers: int = 6,
    boxes_per_image: int = 7,
    repeats: int = 15,
    device: str = "cpu",
    seed: int = 0,
) -> list[dict]:
    """Measure the seconds of one criterion with its matching, forward and backward, in interleaved rounds.

    Rows: milliseconds of both criteria (medians), their ratio, and ours against itself (the noise). An AssertionError
    is raised if the two total losses differ.
    """
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_layers, batch_size, num_queries, NUM_CLASSES + 1, generator=generator).to(device)
    boxes = torch.rand(num_layers, batch_size, num_queries, 4, generator=generator).mul(0.4).add(0.1).to(device)
    logits.requires_grad_(), boxes.requires_grad_()
    targets = [_random_target(boxes_per_image, generator, device) for _ in range(batch_size)]
    labels = [{"class_labels": target["labels"], "boxes": target["boxes_cxcywh"]} for target in targets]
    criterion = DetrCriterion(NUM_CLASSES, num_layers).to(device)
    denominators = criterion.denominators(targets, num_queries)

    def ours() -> Tensor:
        losses, _ = criterion(logits, boxes, targets, denominators)
        return sum(WEIGHTS[name.rstrip("_0123456789")] * loss for name, loss in losses.items())

    def theirs() -> Tensor:
        config = TRANSFORMERS_CONFIG
        total, _, _ = ForObjectDetectionLoss(logits[-1], labels, logits.device, boxes[-1], config, logits, boxes)
        return total

    torch.testing.assert_close(ours(), theirs(), rtol=1e-4, atol=0)
    rounds = in_turn(lambda: ours().backward(), lambda: theirs().backward(), repeats, warm_up=2)
    measured = {
        "ours": ("ms", [1000 * first for first, _, _ in rounds]),
        "transformers": ("ms", [1000 * other for _, other, _ in rounds]),
        "transformers / ours": ("x", [other / first for first, other, _ in rounds]),
        "ours / ours (noise)": ("x", [again / first for first, _, again in rounds]),
    }
    return medians("criterion: ", measured)


def _random_target(num_boxes: int, generator: torch.Generator, device: str) -> dict[str, Tensor]:
    boxes_cxcywh = torch.rand(num_boxes, 4, generator=generator) * 0.4 + 0.1
    target = {
        "boxes": cxcywh_to_xyxy(boxes_cxcywh),
        "boxes_cxcywh": boxes_cxcywh,
        "labels": torch.randint(NUM_CLASSES, (num_boxes,), generator=generator),
        "size": torch.tensor([1, 1]),
    }
    return {key: value.to(device) for key, value in target.items()}
