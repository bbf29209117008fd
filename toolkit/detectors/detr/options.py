"""Settings of the DETR family, one dataclass per architecture, with the values of its paper."""

from dataclasses import dataclass
from typing import Literal

from toolkit.base.number_types import (
    ClosedUnitInterval,
    FewInt,
    Multiple,
    NonNegativeFloat,
    PositiveFloat,
    WidthInt,
    WidthOrNoneInt,
)
from toolkit.models import DetectorOptions


@dataclass
class TransformerOptions(DetectorOptions):
    """Settings of every member of the DETR family."""

    d_model: WidthInt | None = 256
    """Hidden dimension of the transformer; null: a pretrained model's encoder and decoder have different ones."""
    heads: WidthInt | None = 8
    """Attention heads per transformer layer; null: a pretrained model's encoder and decoder have different numbers."""
    encoder_layers: FewInt = 6
    """Number of encoder layers."""
    ffn_dim: WidthInt | None = 2048
    """Hidden dimension of the feed-forward layers; null: a pretrained model's encoder and decoder have different
    ones."""
    num_queries: WidthInt = 300
    """Number of object queries, each of which can detect one object per image."""
    dropout: ClosedUnitInterval = 0.0
    """Dropout probability in the transformer."""
    mean: list[float] | None = None
    """Mean RGB values in [0, 1] for normalising images; null: those of the backbone's training, else ImageNet's."""
    std: list[PositiveFloat] | None = None
    """Standard deviations of RGB values in [0, 1] for normalising images; null: those of the backbone's training, else
    ImageNet's."""


@dataclass
class DecoderOptions(TransformerOptions):
    """Members with matching cost weights and a decoder of adjustable depth."""

    class_cost: NonNegativeFloat = 2.0
    """Matching cost weight of the class probability, in the assignment of queries to objects."""
    bbox_cost: NonNegativeFloat = 5.0
    """Matching cost weight of the L1 distance between boxes, in the assignment of queries to objects."""
    giou_cost: NonNegativeFloat = 2.0
    """Matching cost weight of the generalised IoU of boxes, in the assignment of queries to objects."""

    decoder_layers: FewInt = 6
    """Number of decoder layers."""
    aux_loss: bool = True
    """Compute the losses after every decoder layer (auxiliary losses) instead of the last one only."""


@dataclass
class BackboneOptions(DecoderOptions):
    """Members on a timm backbone."""

    backbone: str | None = "resnet50"
    """timm model that is the backbone; null: a pretrained model's backbone that is not timm's."""
    freeze: Literal["paper", "norms", "none"] = "paper"
    """Backbone parts to freeze: paper (stem, first stage and batch norms), norms (batch norms only) or none. If this is
    not given, a pretrained model's own backbone that is neither timm's nor a ResNet is trained as a whole."""


@dataclass
class ConditionalDetrOptions(BackboneOptions):
    """Conditional DETR."""

    architecture: str = "conditional_detr"
    dropout: ClosedUnitInterval = 0.1
    dilation: bool = False
    """Use dilation instead of stride in the last stage of the backbone (DC5), which doubles the resolution of its
    feature map."""


@dataclass
class DabDetrOptions(ConditionalDetrOptions):
    """DAB-DETR."""

    architecture: str = "dab-detr"
    dropout: ClosedUnitInterval = 0.0


@dataclass
class DetrOptions(ConditionalDetrOptions):
    """DETR."""

    architecture: str = "detr"
    num_queries: WidthInt = 100
    class_cost: NonNegativeFloat = 1.0
    eos_coef: NonNegativeFloat = 0.1
    """Weight of the no-object class in the classification loss, relative to 1 for the class of an object."""
    position_embedding: Literal["sine", "learned"] = "sine"
    """Position encoding of the feature map: fixed sines, or learned embeddings, which cover 50 positions along a side
    (1600 pixels, 800 with dilation)."""
    query_points: bool = False
    """Queries anchored at reference points on a grid: each first attends near its point and predicts its box relative
    to it. Short trainings from random weights converge many times faster with it. transformers has no such DETR, so
    `final/` is then in this toolkit's own format."""
    pre_norm: bool = False
    """Normalise before instead of after each sublayer of the transformer (pre-norm). transformers has no such DETR, so
    `final/` is then in this toolkit's own format."""


@dataclass
class DeformableDetrOptions(BackboneOptions):
    """Deformable DETR."""

    architecture: str = "deformable_detr"
    ffn_dim: WidthInt | None = 1024
    dropout: ClosedUnitInterval = 0.1
    d_model: WidthInt | None = 256
    """Hidden dimension of the transformer, a multiple of 32."""
    box_refine: Literal["none", "iterative", "two_stage"] = "none"
    """Box refinement: none (all decoder layers use the same reference points), iterative (each layer refines the boxes
    of the previous one), or two_stage (iterative, starting from proposals of the encoder)."""


@dataclass
class RfDetrOptions(DecoderOptions):
    """RF-DETR, base unless `size` says otherwise."""

    architecture: str = "rf_detr"
    size: Literal["nano", "small", "medium", "large", "base"] | None = "base"
    """Published size: patches, windows and positions of the backbone and number of decoder layers. The publisher trains
    nano with images of 384 pixels, small of 512, medium of 576, large (of 2026) of 704, and base, which it no longer
    recommends, of 560. null: a pretrained model has another one."""
    heads: WidthInt | None = 8
    """Attention heads of the decoder's self-attention; its deformable attention has twice as many. null: a pretrained
    model has another ratio."""
    encoder_layers: FewInt = 11
    """Number of layers of the vision transformer backbone; if it is not given, that of the size (base 11, because the
    twelfth lies behind its deepest feature map and is not built; others 12). Other numbers give a map at each quarter.
    """
    decoder_layers: FewInt = 3
    """Number of decoder layers; if it is not given, that of the size (nano 2, small 3, medium and large 4, base 3)."""
    masks: bool = False
    """Also predict a mask of each object, at a quarter of the size of the image; the data need masks."""


@dataclass
class LwDetrOptions(DecoderOptions):
    """LW-DETR, small unless `size` says otherwise."""

    architecture: str = "lw_detr"
    size: Literal["tiny", "small", "medium", "large", "xlarge"] | None = "small"
    """Published size: the vision transformer that is the backbone, its feature maps, and the settings of structure that
    are not given. The publisher trains all sizes with images of 640 pixels. null: a pretrained model has another
    backbone."""
    heads: WidthInt | None = 8
    """Attention heads of the decoder's self-attention; its deformable attention has twice as many. null: a pretrained
    model has another ratio."""
    encoder_layers: FewInt = 10
    """Number of layers of the vision transformer backbone; if it is not given, that of the size (tiny 6, others 10)."""
    decoder_layers: FewInt = 3
    """Number of decoder layers."""
    num_queries: WidthInt = 300
    """Number of object queries, each of which can detect one object per image; if it is not given, that of the size
    (tiny 100, others 300)."""


@dataclass
class HybridOptions(TransformerOptions):
    """RT-DETR-v2 and its successors, apart from their backbones."""

    encoder_layers: FewInt = 1
    """Number of transformer layers in the encoder."""
    decoder_layers: FewInt = 6
    """Number of decoder layers, at least 2."""
    ffn_dim: WidthInt | None = 1024
    num_queries: WidthInt = 300
    """Number of object queries, each of which can detect one object per image; at most the number of positions in the
    feature maps of an image."""
    num_denoising: WidthOrNoneInt = 100
    """Number of denoising queries in training, made from the annotated objects of an image; 0 disables denoising."""
    hidden_expansion: Multiple = 1.0
    """Width of the encoder's convolution blocks as a fraction of `model.d_model`."""
    varifocal_gamma: NonNegativeFloat = 2.0
    """Focusing exponent of the varifocal classification loss: the larger, the less do wrong classes with a low
    probability count. 1 separates classes sooner when training from random weights."""


@dataclass
class RTDetrV2Options(HybridOptions):
    """RT-DETR-v2, as published with its ResNet-18."""

    architecture: str = "rt_detr_v2"
    backbone: str | None = "resnet18d"
    """timm model that is the backbone, with feature maps of strides 8, 16 and 32; null: a pretrained model's backbone
    that is not timm's."""
    freeze: Literal["paper", "norms", "none"] = "norms"
    """Backbone parts to freeze: paper (stem, first stage and batch norms), norms (batch norms only) or none. If this is
    not given, a pretrained model's own setting is used."""


@dataclass
class RefinementOptions(HybridOptions):
    """D-FINE and its successors, apart from their backbones."""

    depth_mult: Multiple = 0.34
    """Depth multiplier: number of blocks in the encoder's convolution layers as a fraction of 3."""
    union_matching: bool = True
    """Compute box losses on the union of the matches of all decoder layers, instead of on each layer's own matches."""


@dataclass
class DFineOptions(RefinementOptions, RTDetrV2Options):
    """D-FINE-S."""

    architecture: str = "d_fine"
    backbone: str | None = "hgnetv2_b0"
    freeze: Literal["paper", "norms", "none"] = "none"
    decoder_layers: FewInt = 3
    hidden_expansion: Multiple = 0.5


@dataclass
class Deimv2Options(DFineOptions):
    """DEIMv2, unless `size` says otherwise with the widths of S on the backbone of N with an additional stride 8."""

    architecture: str = "deimv2"
    size: Literal["atto", "femto", "pico", "n", "s", "m", "l", "x"] | None = None
    """Published size, with its own backbone: HGNetV2 from atto to n, DINOv3 with an adapter from s to x; `original` is
    then true. The publisher trains atto with images of 320 pixels, femto of 416, all others of 640. null: a timm
    backbone, or what a pretrained model has."""
    original: bool = False
    """Choose queries, embed their positions and predict as DEIMv2's own program does, with whose weights transformers'
    DEIMv2 predicts something else. Files of that program are always used so. transformers has no such DEIMv2, so
    `final/` is then in this toolkit's own format."""
    d_model: WidthInt | None = 192
    ffn_dim: WidthInt | None = 512
    decoder_layers: FewInt = 4
    hidden_expansion: Multiple = 0.34
    depth_mult: Multiple = 0.67
    varifocal_gamma: NonNegativeFloat = 1.5


@dataclass
class EcdetOptions(RefinementOptions):
    """ECDet, S unless `size` says otherwise."""

    architecture: str = "ecdet"
    size: Literal["s", "m", "l", "x"] | None = "s"
    """Published size: the vision transformer that is the backbone, and the settings of structure that are not given.
    The publisher trains all sizes with images of 640 pixels. null: a pretrained model has another backbone."""
    d_model: WidthInt | None = 192
    ffn_dim: WidthInt | None = 512
    decoder_layers: FewInt = 4
    hidden_expansion: Multiple = 0.34
    depth_mult: Multiple = 0.67
    varifocal_gamma: NonNegativeFloat = 1.5
