"""RT-DETR's criterion: varifocal classification, L1 and GIoU, for all decoder layers, encoder and denoising at once.

Same numbers as `transformers.loss.loss_rt_detr.RTDetrLoss`, which goes through the layers one by one and matches each
on the host; here one cost tensor covers them all, as in `detr_criterion.py`.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from toolkit.batch import send
from toolkit.box_ops import box_iou, cxcywh_to_xyxy, generalized_box_iou
from toolkit.models.detr import focal_criterion
from toolkit.models.detr.detr_criterion import Matches, MatchingCosts, PaddedTargets, pad_targets

# The published values (RT-DETRv2 configs, transformers' RTDetrV2Config): of the matching, of the varifocal loss.
MATCHING_COSTS = MatchingCosts(class_cost=2.0, bbox_cost=5.0, giou_cost=2.0)
VARIFOCAL_ALPHA = 0.75


class RTDetrCriterion(nn.Module):
    """Losses `loss_vfl`, `loss_bbox`, `loss_giou` of the last decoder layer, and of every other output by suffix.

    `_aux_i`: decoder layer i. `_enc`: the encoder's proposals. `_dn_i`: the denoising queries in layer i.

    Args:
        num_classes: object classes C, the columns of the logits.
        num_layers: decoder layers.
        denoising: whether the model makes denoising queries in training.
        varifocal_gamma: how much less a wrong class counts while its probability is low (published: 2).
    """

    divided_by, metric_names = "boxes", ()

    def __init__(self, num_classes: int, num_layers: int, denoising: bool, varifocal_gamma: float = 2.0):
        super().__init__()
        self.varifocal_gamma = varifocal_gamma
        self.num_classes = num_classes
        self.query_suffixes = (*(f"_aux_{i}" for i in range(num_layers - 1)), "", "_enc")
        self.denoising_suffixes = tuple(f"_dn_{i}" for i in range(num_layers)) if denoising else ()
        announced = ("", *(s for s in self.query_suffixes if s), *self.denoising_suffixes)
        self.loss_names = tuple(f"{name}{s}" for s in announced for name in ("loss_vfl", "loss_bbox", "loss_giou"))

    def forward(self, layers: Mapping, targets: Sequence[Mapping[str, Tensor]], boxes_denominator) -> dict[str, Tensor]:
        """Losses by name, float32 (float64 for float64 input), whatever autocast says.

        Args:
            layers: `logits (B, L, D + Q, C)` and `boxes (B, L, D + Q, 4)` of all decoder layers, denoising queries
                first; `encoder_logits (B, Q, C)` and `encoder_boxes (B, Q, 4)`; `denoising`: transformers'
                `denoising_meta_values`, None when there are none (no boxes in the batch, evaluation), and then the
                `_dn_i` losses are missing. Boxes are cxcywh, fractions of the image.
            targets: per image, see `pad_targets`, without crowd regions.
            boxes_denominator: what every sum is divided by; those of denoising also by the number of its groups, which
                depends on the fullest image of the batch.
        """
        device = layers["logits"].device
        with torch.autocast(device.type, enabled=False):
            logits, boxes = (full_precision(layers[key]).transpose(0, 1) for key in ("logits", "boxes"))
            padded = pad_targets(targets, device, logits.dtype)
            meta = layers["denoising"]
            noisy = meta["dn_num_split"][0] if meta is not None else 0
            query_logits = torch.cat([logits[:, :, noisy:], full_precision(layers["encoder_logits"])[None]])
            query_boxes = torch.cat([boxes[:, :, noisy:], full_precision(layers["encoder_boxes"])[None]])
            matches = match_focal(query_logits.detach(), query_boxes.detach(), padded)
            losses = self._losses(query_logits, query_boxes, padded, matches, self.query_suffixes, boxes_denominator)
            if meta is not None:
                known = denoising_matches(meta, [len(t["labels"]) for t in targets], len(logits), device)
                shared = boxes_denominator * meta["dn_num_group"]
                noisy_logits, noisy_boxes = logits[:, :, :noisy], boxes[:, :, :noisy]
                losses |= self._losses(noisy_logits, noisy_boxes, padded, known, self.denoising_suffixes, shared)
            return losses

    def _losses(self, logits, boxes, targets: PaddedTargets, matches: Matches, suffixes, denominator):
        """Every layer has the same number of matches, in the order of the layers: sums by layer are sums of rows."""
        where = (matches.layer, matches.image, matches.query)
        labels = targets.labels[matches.image, matches.target]
        predicted = cxcywh_to_xyxy(boxes[where])
        wanted_cxcywh = targets.boxes_cxcywh[matches.image, matches.target]
        wanted = cxcywh_to_xyxy(wanted_cxcywh)
        score = torch.zeros_like(logits, requires_grad=False)
        score[(*where, labels)] = box_iou(predicted.detach(), wanted)
        weight = VARIFOCAL_ALPHA * logits.detach().sigmoid().pow(self.varifocal_gamma)
        weight[(*where, labels)] = score[(*where, labels)]
        varifocal = F.binary_cross_entropy_with_logits(logits, score, weight=weight, reduction="none")
        by_layer = (len(logits), len(labels) // len(logits))
        sums = {
            "loss_vfl": varifocal.flatten(1).sum(1),
            "loss_bbox": (boxes[where] - wanted_cxcywh).abs().sum(-1).view(by_layer).sum(1),
            "loss_giou": (1 - generalized_box_iou(predicted, wanted)).view(by_layer).sum(1),
        }
        return {
            f"{name}{suffix}": value
            for name, values in sums.items()
            for suffix, value in zip(suffixes, (values / denominator).unbind(), strict=True)
        }


def match_focal(logits: Tensor, boxes_cxcywh: Tensor, targets: PaddedTargets) -> Matches:
    """Assignment of every layer `(L, B, Q, C)`, `(L, B, Q, 4)`, with the focal class cost of Deformable DETR."""
    return focal_criterion.match_focal(logits, boxes_cxcywh, targets, MATCHING_COSTS)


def denoising_matches(meta: Mapping, counts: Sequence[int], num_layers: int, device: torch.device) -> Matches:
    """Which object each positive denoising query was made from: every group repeats the objects of its image."""
    repeated = [torch.arange(n).repeat(meta["dn_num_group"]) for n in counts]
    image = torch.arange(len(counts)).repeat_interleave(torch.tensor([len(r) for r in repeated]))
    image, target = send(torch.stack([image, torch.cat(repeated)]), device)
    query = torch.cat(list(meta["dn_positive_idx"]))
    layer = torch.arange(num_layers, device=device).repeat_interleave(len(query))
    return Matches(layer, image.repeat(num_layers), query.repeat(num_layers), target.repeat(num_layers))


def full_precision(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
