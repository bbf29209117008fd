"""D-FINE (Peng et al., 2024, arXiv 2410.13842) and DEIMv2 (Huang et al., 2025, arXiv 2509.20787) on any timm backbone.

transformers' models, our criterion, as in `rt_detr.py`, whose decoder they refine: a side of a box is a distribution
over offsets, which every layer adds to. DEIMv2 is D-FINE with lighter encoder and decoder, and another loss of classes.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from transformers import Deimv2Config, DFineConfig

from toolkit.models.detr.d_fine_criterion import DFineCriterion
from toolkit.models.detr.detr_criterion import count_objects
from toolkit.models.detr.rt_detr import RTDetrV2, without_crowd


class DFine(RTDetrV2):
    """A detector (see docs/design.md) around `transformers.DFineForObjectDetection`; published: D-FINE-S.

    Args:
        depth_mult: blocks of the encoder's convolution layers, as a fraction of 3.
        union_matching: see `DFineCriterion`; as published, while transformers has it in DEIMv2 only.
        varifocal_gamma: exponent of the loss of classes, see `DFineCriterion`.

    The others, and what is raised: see `RTDetrV2`. Images must have one size, a multiple of 32, and fill it.
    """

    default_weights = {"loss_vfl": 1.0, "loss_bbox": 5.0, "loss_giou": 2.0, "loss_fgl": 0.15, "loss_ddf": 1.5}
    denominator_names = DFineCriterion.denominator_names
    config_class, classification = DFineConfig, "vfl"
    published = {
        **RTDetrV2.published,
        "backbone": "hgnetv2_b0",
        "freeze": "none",
        "decoder_layers": 3,
        "hidden_expansion": 0.5,
        "depth_mult": 0.34,
        "decoder_n_points": [3, 6, 3],
    }

    def __init__(
        self,
        *,
        class_names: Sequence[str],
        source_config: Mapping[str, Any] | None = None,
        backbone: str | None = None,
        pretrained_backbone: bool | str = False,
        freeze: str | None = None,
        d_model: int | None = None,
        heads: int | None = None,
        encoder_layers: int | None = None,
        decoder_layers: int | None = None,
        ffn_dim: int | None = None,
        num_queries: int | None = None,
        num_denoising: int | None = None,
        hidden_expansion: float | None = None,
        depth_mult: float | None = None,
        union_matching: bool = True,
        varifocal_gamma: float | None = None,
        dropout: float | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
    ):
        nn.Module.__init__(self)
        options = {
            "backbone": backbone,
            "pretrained_backbone": pretrained_backbone,
            "freeze": freeze,
            "d_model": d_model,
            "heads": heads,
            "encoder_layers": encoder_layers,
            "decoder_layers": decoder_layers,
            "ffn_dim": ffn_dim,
            "num_queries": num_queries,
            "num_denoising": num_denoising,
            "hidden_expansion": hidden_expansion,
            "depth_mult": depth_mult,
            "varifocal_gamma": varifocal_gamma,
            "dropout": dropout,
        }
        config = self._build(class_names, source_config, options, mean, std)
        self.set_loss = DFineCriterion(
            len(class_names), config.decoder_layers, config.num_denoising > 0, self.classification,
            config.focal_loss_gamma, union_matching, config.max_num_bins, config.reg_scale, config.up,
        )  # fmt: skip
        self.loss_names = self.set_loss.loss_names

    def forward(self, images: Tensor, sizes: Tensor, targets: Sequence[Mapping] | None = None) -> dict:
        """Predictions, and with targets what `DFineCriterion.forward` takes beside them; see `RTDetrV2.forward`."""
        # Outside training mode the decoder keeps the last layer only, and the loss would lack the others.
        self.model.model.decoder.training = self.training or targets is not None
        return super().forward(images, sizes, targets)

    def _layers(self, outputs: Any) -> dict:
        references = outputs.initial_reference_points[:, 0]  # the same for every layer
        return super()._layers(outputs) | {"corners": outputs.intermediate_predicted_corners, "references": references}

    def denominators(self, targets: Sequence[Mapping]) -> dict[str, float]:
        """This batch's number of boxes, crowd regions not counted, and of images, from CPU targets."""
        return {"boxes": float(sum(count_objects(targets))), "images": float(len(targets))}

    def criterion(self, outputs: Mapping, targets: Sequence[Mapping], denominators: Mapping):
        """Losses of `forward`'s outputs, `(losses, {})`: there are no metrics; see `DFineCriterion.forward`."""
        return self.set_loss(outputs["layers"], list(map(without_crowd, targets)), denominators), {}


class Deimv2(DFine):
    """A detector (see docs/design.md) around `transformers.Deimv2ForObjectDetection`; published: DEIMv2-S.

    Arguments: see `DFine`. The published DEIMv2-S has a DINOv3 backbone with an adapter, which timm's are not: here it
    is the HGNetV2-B0 of DEIMv2-N, with maps of stride 8 too; `source_config` builds the published ones.
    """

    default_weights = {"loss_mal": 1.0, "loss_bbox": 5.0, "loss_giou": 2.0, "loss_fgl": 0.15, "loss_ddf": 1.5}
    config_class, classification = Deimv2Config, "mal"
    published = {
        **DFine.published,
        "d_model": 192,
        "ffn_dim": 512,
        "decoder_layers": 4,
        "hidden_expansion": 0.34,
        "depth_mult": 0.67,
        "varifocal_gamma": 1.5,
        "decoder_activation_function": "silu",
        "encoder_has_trailing_conv": False,
    }

    def _backbone(self) -> nn.Module:
        encoder = self.model.model.conv_encoder
        return encoder.backbone if hasattr(encoder, "backbone") else encoder.model
