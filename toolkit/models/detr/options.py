"""Settings of the DETR family, one dataclass per architecture, with the values of its paper."""

from dataclasses import dataclass
from typing import Literal

from toolkit.models.options import DetectorOptions


@dataclass
class TransformerOptions(DetectorOptions):
    """What every member has."""

    d_model: int | None = 256
    """Width of the transformer in channels; null: a pretrained model's encoder and decoder keep different widths."""
    heads: int | None = 8
    """Attention heads per transformer layer; null: a pretrained model's encoder and decoder keep different numbers."""
    encoder_layers: int = 6
    """Number of encoder layers."""
    ffn_dim: int | None = 2048
    """Width of the feed-forward layers in channels; null: a pretrained model's encoder and decoder keep different
    widths."""
    num_queries: int = 300
    """Number of queries, each of which may find one object of an image."""
    dropout: float = 0.0
    """Probability of dropout in the transformer, from 0 to 1."""
    mean: list[float] | None = None
    """Mean of the red, green and blue values, from 0 to 1, that is subtracted from images; null: that of the
    images that the backbone was trained with, else ImageNet's."""
    std: list[float] | None = None
    """Standard deviation of the red, green and blue values, from 0 to 1, that images are divided by; null: that of
    the images that the backbone was trained with, else ImageNet's."""


@dataclass
class MatchingOptions(TransformerOptions):
    """Members whose matching has weights of its own."""

    class_cost: float = 2.0
    """Weight of the class term in the matching of queries with objects."""
    bbox_cost: float = 5.0
    """Weight of the L1 distance of boxes in the matching of queries with objects."""
    giou_cost: float = 2.0
    """Weight of the generalised IoU of boxes in the matching of queries with objects."""


@dataclass
class DecoderOptions(MatchingOptions):
    """Members with a decoder."""

    decoder_layers: int = 6
    """Number of decoder layers."""
    aux_loss: bool = True
    """Give every decoder layer a loss, instead of the last one alone."""


@dataclass
class BackboneOptions(DecoderOptions):
    """Members on a timm backbone."""

    backbone: str | None = "resnet50"
    """Name of the timm model that images go through first; null: a pretrained model's backbone that is not timm's."""
    freeze: Literal["paper", "norms", "none"] = "paper"
    """What of the backbone is not trained: `paper`: stem, first stage and batch norms; `norms`: batch norms; `none`:
    nothing. A pretrained model's own backbone that is neither timm's nor a ResNet is trained whole if this is not
    given."""


@dataclass
class ConditionalDetrOptions(BackboneOptions):
    """Conditional DETR."""

    architecture: str = "conditional_detr"
    dropout: float = 0.1
    dilation: bool = False
    """Dilate the last stage of the backbone instead of striding it (DC5), which doubles height and width of its map."""


@dataclass
class DabDetrOptions(ConditionalDetrOptions):
    """DAB-DETR."""

    architecture: str = "dab-detr"
    dropout: float = 0.0


@dataclass
class DetrOptions(ConditionalDetrOptions):
    """DETR."""

    architecture: str = "detr"
    num_queries: int = 100
    class_cost: float = 1.0
    eos_coef: float = 0.1
    """Weight of the no-object class in the loss of classes, where an object's class weighs 1."""
    position_embedding: Literal["sine", "learned"] = "sine"
    """How positions in the image are told apart: by fixed sines, or by learned vectors, which reach 50 positions along
    a side (1600 pixels, 800 with dilation)."""
    query_points: bool = False
    """Give each query a point of a grid over the image, around which it looks first and from which its box is told.
    Short trainings from random weights learn many times sooner with it. transformers has no such DETR, so `final/` is
    then in this toolkit's own format."""
    pre_norm: bool = False
    """Normalise before each part of a transformer layer instead of after it. transformers has no such DETR, so `final/`
    is then in this toolkit's own format."""


@dataclass
class DeformableDetrOptions(BackboneOptions):
    """Deformable DETR."""

    architecture: str = "deformable_detr"
    ffn_dim: int | None = 1024
    dropout: float = 0.1
    d_model: int | None = 256
    """Width of the transformer in channels, a multiple of 32."""
    box_refine: Literal["none", "iterative", "two_stage"] = "none"
    """Whether boxes are refined: `iterative`: every decoder layer refines those of the layer before; `two_stage`: the
    encoder also proposes those to start from; `none`: every decoder layer begins at the same points."""


@dataclass
class RfDetrOptions(DecoderOptions):
    """RF-DETR base."""

    architecture: str = "rf_detr"
    heads: int | None = 8
    """Attention heads of the decoder's self-attention, of which its deformable attention has twice as many; null: a
    pretrained model keeps another proportion."""
    encoder_layers: int = 12
    """Number of layers of the vision transformer, whose maps are taken at four depths."""
    decoder_layers: int = 3


@dataclass
class YolosOptions(MatchingOptions):
    """YOLOS-Ti."""

    architecture: str = "yolos"
    d_model: int | None = 192
    """Width of the vision transformer in channels."""
    heads: int | None = 3
    """Attention heads per layer of the vision transformer."""
    encoder_layers: int = 12
    """Number of layers of the vision transformer."""
    ffn_dim: int | None = 768
    """Width of the vision transformer's feed-forward layers in channels."""
    num_queries: int = 100
    """Number of detection tokens, each of which may find one object of an image."""
    class_cost: float = 1.0
    eos_coef: float = 0.1
    """Weight of the no-object class in the loss of classes, where an object's class weighs 1."""


@dataclass
class RTDetrV2Options(TransformerOptions):
    """RT-DETR-v2, as published with its ResNet-18."""

    architecture: str = "rt_detr_v2"
    backbone: str | None = "resnet18d"
    """Name of the timm model that images go through first, with maps of stride 8, 16 and 32 pixels; null: a pretrained
    model's backbone that is not timm's."""
    freeze: Literal["paper", "norms", "none"] = "norms"
    """What of the backbone is not trained: `paper`: stem, first stage and batch norms; `norms`: batch norms; `none`:
    nothing. If this is not given, a pretrained model's own setting counts."""
    encoder_layers: int = 1
    """Number of transformer layers in the encoder."""
    decoder_layers: int = 6
    """Number of decoder layers, 2 or more."""
    ffn_dim: int | None = 1024
    num_queries: int = 300
    """Number of queries, each of which may find one object of an image; the maps of an image must have as many
    positions."""
    num_denoising: int = 100
    """Number of denoising queries in training, made from the objects of the image; 0: none."""
    hidden_expansion: float = 1.0
    """Width of the encoder's convolution blocks as a fraction of d_model."""
    varifocal_gamma: float = 2.0
    """Exponent by which a wrong class counts less while its probability is low, in the loss of classes; 1 tells classes
    apart sooner when training from random weights."""


@dataclass
class DFineOptions(RTDetrV2Options):
    """D-FINE-S."""

    architecture: str = "d_fine"
    backbone: str | None = "hgnetv2_b0"
    freeze: Literal["paper", "norms", "none"] = "none"
    decoder_layers: int = 3
    hidden_expansion: float = 0.5
    depth_mult: float = 0.34
    """Number of blocks in the encoder's convolution layers as a fraction of 3."""
    union_matching: bool = True
    """Give the losses of boxes to every query that any layer matched, instead of to each layer's own matches."""


@dataclass
class Deimv2Options(DFineOptions):
    """DEIMv2-S, on the backbone of DEIMv2-N with a map of stride 8 too, as its own DINOv3 is none of timm's."""

    architecture: str = "deimv2"
    d_model: int | None = 192
    ffn_dim: int | None = 512
    decoder_layers: int = 4
    hidden_expansion: float = 0.34
    depth_mult: float = 0.67
    varifocal_gamma: float = 1.5
