"""RT-DETR's criterion: varifocal classification, L1 and GIoU, for all decoder layers, encoder and denoising at once.

The losses equal those of `transformers.loss.loss_rt_detr.RTDetrLoss`, which processes the layers one by one and matches
each of them on the host; here one cost tensor covers all layers, as in `detr_criterion.py`.
"""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from toolkit.base.batch import send
from toolkit.detectors.detr.detr_criterion import MatchingCosts, QueryMatches, box_terms, full_precision, pad_targets
from toolkit.detectors.detr.focal_criterion import match_focal, matched_losses

# The published values (RT-DETRv2 configs, transformers' RTDetrV2Config): of the matching, of the varifocal loss.
MATCHING_COSTS = MatchingCosts(class_cost=2.0, bbox_cost=5.0, giou_cost=2.0)
VARIFOCAL_ALPHA = 0.75


def varifocal_terms(logits: Tensor, positives: tuple[Tensor, ...], ious: Tensor, gamma: float) -> Tensor:
    """Return the varifocal loss of every logit: at `positives` a cross-entropy with the IoU as target and as weight;
    elsewhere with target 0 and a weight proportional to score^`gamma`.

    positives: one index tensor for each dimension of the logits. ious: IoU of the box with its object, for each of
    these.
    """
    score = torch.zeros_like(logits, requires_grad=False)
    score[positives] = ious
    weight = VARIFOCAL_ALPHA * logits.detach().sigmoid().pow(gamma)
    weight[positives] = score[positives]
    return F.binary_cross_entropy_with_logits(logits, score, weight=weight, reduction="none")


class RTDetrCriterion(nn.Module):
    """Losses `loss_vfl`, `loss_bbox` and `loss_giou` of the last decoder layer, and the same of other outputs with a
    suffix.

    The suffix is `_aux_i` for decoder layer i, `_enc` for the encoder's proposals, and `_dn_i` for the denoising
    queries in layer i.

    Args:
        num_layers: number of decoder layers.
        denoising: the model makes denoising queries in training.
        varifocal_gamma: focusing exponent; the larger, the less does a wrong class with a low probability count
            (published: 2).
    """

    divided_by = "boxes"
    metric_names = ()

    def __init__(self, num_layers: int, denoising: bool, varifocal_gamma: float):
        super().__init__()
        self.class_terms = partial(varifocal_terms, gamma=varifocal_gamma)
        auxiliary = [f"_aux_{i}" for i in range(num_layers - 1)]
        self.query_suffixes = (*auxiliary, "", "_enc")
        self.denoising_suffixes = tuple(f"_dn_{i}" for i in range(num_layers)) if denoising else ()
        last_first = ("", *auxiliary, "_enc", *self.denoising_suffixes)
        self.loss_names = tuple(
            f"{name}{suffix}" for suffix in last_first for name in ("loss_vfl", "loss_bbox", "loss_giou")
        )

    def forward(
        self,
        layers: Mapping,
        targets: Sequence[Mapping[str, Tensor]],
        denominators: Mapping[str, Tensor | float],
        class_weights: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Return losses by name in float32 (float64 for float64 input), regardless of autocast.

        Args:
            layers: `logits (B, L, D + Q, C)` and `boxes (B, L, D + Q, 4)` of all L decoder layers, for D denoising
                queries, followed by Q queries; `encoder_logits (B, Q, C)` and `encoder_boxes (B, Q, 4)`; `denoising`:
                transformers' `denoising_meta_values`, or None if there are no denoising queries (no boxes in the batch,
                or evaluation), and then there are no `_dn_i` losses. Boxes are cxcywh, fractions of the image.
            targets: per image, see `pad_targets`, without crowd regions.
            denominators: `boxes`, the divisor of every sum. Sums over denoising queries are also divided by the number
                of denoising groups, which depends on the largest number of objects in an image of the batch.
            class_weights: (C,), `Detector.class_weights`.
        """
        device = layers["logits"].device
        with torch.autocast(device.type, enabled=False):
            logits = full_precision(layers["logits"]).transpose(0, 1)  # (L, B, D + Q, C)
            boxes = full_precision(layers["boxes"]).transpose(0, 1)
            encoder_logits = full_precision(layers["encoder_logits"])
            encoder_boxes = full_precision(layers["encoder_boxes"])
            padded = pad_targets(targets, device, logits.dtype)
            meta = layers["denoising"]
            noisy = meta["dn_num_split"][0] if meta is not None else 0  # D
            query_logits = torch.cat([logits[:, :, noisy:], encoder_logits[None]])
            query_boxes = torch.cat([boxes[:, :, noisy:], encoder_boxes[None]])
            matches = match_focal(query_logits, query_boxes, padded, MATCHING_COSTS)
            predictions = [(query_boxes, matches)]
            if meta is not None:
                counts = [len(target["labels"]) for target in targets]
                noise_matches = denoising_matches(meta, counts, len(logits), device)
                predictions.append((boxes[:, :, :noisy], noise_matches))
            of_boxes, *of_noise = box_terms(predictions, padded)
            losses = matched_losses(
                query_logits,
                of_boxes,
                padded,
                matches,
                self.query_suffixes,
                self.class_terms,
                "loss_vfl",
                denominators["boxes"],
                class_weights,
            )
            if meta is not None:
                losses |= matched_losses(
                    logits[:, :, :noisy],
                    *of_noise,
                    padded,
                    noise_matches,
                    self.denoising_suffixes,
                    self.class_terms,
                    "loss_vfl",
                    denominators["boxes"] * meta["dn_num_group"],
                    class_weights,
                )
            return losses


def denoising_matches(meta: Mapping, counts: Sequence[int], num_layers: int, device: torch.device) -> QueryMatches:
    """Return the matches of the positive denoising queries with the objects that these were made from. Every denoising
    group repeats all objects of its image, and the matches are repeated for each of `num_layers` layers.

    meta: transformers' `denoising_meta_values`. counts: number of objects of each image.
    """
    # Of 2 and 1 objects in 2 groups: targets 0 1 0 1 0 0 of the images 0 0 0 0 1 1.
    targets = [torch.arange(count).repeat(meta["dn_num_group"]) for count in counts]
    lengths = torch.tensor([len(of_image) for of_image in targets])
    images = torch.arange(len(counts)).repeat_interleave(lengths)
    image, target = send(torch.stack([images, torch.cat(targets)]), device)
    query = torch.cat(list(meta["dn_positive_idx"]))
    layer = torch.arange(num_layers, device=device).repeat_interleave(len(query))
    return QueryMatches(
        layer,
        image.repeat(num_layers),
        query.repeat(num_layers),
        target.repeat(num_layers),
    )
