"""D-FINE (Peng et al., 2024, arXiv 2410.13842) on any timm backbone.

It is transformers' model with the criterion of this toolkit. D-FINE refines the decoder of `rt_detr.py`: each side of a
box is a distribution over offsets that every layer updates.

Files of DEIM and RT-DETRv4 are those of a D-FINE with SiLU in the decoder, where D-FINE has ReLU. transformers cannot
build its heads so; `head_activation`, an entry of the config that transformers does not know, says that they are.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DFineConfig, DFineForObjectDetection, PreTrainedConfig, PreTrainedModel
from transformers.models.d_fine.modeling_d_fine import DFineMLPPredictionHead

from toolkit.detectors.detr.base import TransformersDetector
from toolkit.detectors.detr.d_fine_criterion import DFineCriterion
from toolkit.detectors.detr.detr_criterion import count_objects
from toolkit.detectors.detr.options import DFineOptions, HybridOptions, RefinementOptions
from toolkit.detectors.detr.rt_detr import RTDetrV2
from toolkit.models.detector import Detector


class DFine(RTDetrV2):
    """`transformers.DFineForObjectDetection`. Settings: see `DFineOptions`. See `RTDetrV2` for the images and the
    exceptions.

    With `union_matching`, box losses are computed for every query that some layer matched, as in D-FINE's own program;
    of transformers' criteria only DEIMv2's does so.
    """

    Options = DFineOptions
    config_class = DFineConfig
    model_class = DFineForObjectDetection
    is_mal = False  # the classification loss: varifocal
    entries = {**RTDetrV2.entries, "depth_mult": ["depth_mult"]}
    published = {"decoder_n_points": [3, 6, 3]}
    default_weights = {
        "loss_vfl": 1.0,
        "loss_bbox": 5.0,
        "loss_giou": 2.0,
        "loss_fgl": 0.15,
        "loss_ddf": 1.5,
    }

    def __init__(self, class_names: Sequence[str], options: HybridOptions, *, source_config: Mapping | None = None):
        super().__init__(class_names, options, source_config=source_config)
        self.is_of_transformers = getattr(self.model.config, "head_activation", "relu") != "silu"
        if not self.is_of_transformers:
            silu_in_([*box_heads(self.model), self.model.model.decoder.query_pos_head])

    def save_final(self, folder: Path, categories: Sequence, processor_size: Mapping[str, int] | None = None) -> None:
        """Write a folder for transformers, see `TransformersDetector.save_final`. A model that transformers cannot
        build is written for `load_detector_folder` instead."""
        kind = TransformersDetector if self.is_of_transformers else Detector
        kind.save_final(self, folder, categories, processor_size)

    def _criterion(self, num_classes: int, config: PreTrainedConfig, options: RefinementOptions) -> nn.Module:
        return DFineCriterion(num_classes, config, self.is_mal, options.union_matching)

    def forward(self, images: Tensor, sizes: Tensor, targets: Sequence[Mapping] | None = None) -> dict:
        """Return predictions and, with targets, also the inputs of `DFineCriterion.forward`; see `RTDetrV2.forward`."""
        # Outside training mode the decoder keeps the last layer only, and the loss would lack the others.
        self.model.model.decoder.training = self.training or targets is not None
        return super().forward(images, sizes, targets)

    def _layers(self, outputs: Any) -> dict:
        return {
            **super()._layers(outputs),
            "corners": outputs.intermediate_predicted_corners,
            "references": outputs.initial_reference_points[:, 0],  # the same for every layer
        }

    def denominators(self, targets: Sequence[Mapping]) -> dict[str, float]:
        """Return the number of boxes, without crowd regions, and of images of this batch, from targets on the CPU."""
        return {
            "boxes": float(sum(count_objects(targets))),
            "images": float(len(targets)),
        }


def box_heads(model: PreTrainedModel) -> list[nn.Module]:
    """Return the heads for boxes and their quality of a D-FINE or DEIMv2 of transformers."""
    core = model.model
    boxes = [core.enc_bbox_head, core.decoder.pre_bbox_head, *core.decoder.bbox_embed]
    return [*boxes, *(layer.reg_conf for layer in core.decoder.lqe_layers)]


def silu_in_(heads: Sequence[nn.Module]) -> None:
    """Replace ReLU by SiLU, in place, in these heads of a D-FINE or DEIMv2 of transformers."""
    for head in heads:
        if isinstance(head, DFineMLPPredictionHead):  # whose ReLU is a function
            head.__class__ = _SiluHead
        else:
            head.act = nn.SiLU()


class _SiluHead(DFineMLPPredictionHead):
    def forward(self, x: Tensor) -> Tensor:
        *hidden, last = self.layers
        for layer in hidden:
            x = F.silu(layer(x))
        return last(x)
