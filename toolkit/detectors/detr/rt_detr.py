"""RT-DETR-v2 (Lv et al., 2024, arXiv 2407.17140) on any timm backbone: transformers' model with the criterion of this
toolkit.

transformers computes the loss inside the model's forward, in autocast's precision, weighted, and divided by the boxes
of the batch. Here the forward only collects the inputs of the loss; `criterion` computes the loss afterwards in
float32, unweighted, and divides by the denominators given. Apart from that, the losses equal those of transformers'
`RTDetrLoss`.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    PreTrainedConfig,
    PreTrainedModel,
    RTDetrImageProcessor,
    RTDetrV2Config,
    RTDetrV2ForObjectDetection,
)

from toolkit.base.batch import HostTarget, is_waited_for, on_host, send
from toolkit.base.box_ops import normalize_boxes, xyxy_to_cxcywh
from toolkit.base.errors import BadInput
from toolkit.detectors.detr.base import TransformersDetector, check_positions, precision
from toolkit.detectors.detr.configuration import (
    ENCODER_DECODER,
    pixel_statistics,
    rt_detr_config,
    start_backbone,
    timm_name,
)
from toolkit.detectors.detr.detr_criterion import count_objects
from toolkit.detectors.detr.host_waits import without_host_waits
from toolkit.detectors.detr.initialise import initialise_rt_detr_
from toolkit.detectors.detr.options import HybridOptions, RTDetrV2Options
from toolkit.detectors.detr.rt_detr_criterion import RTDetrCriterion
from toolkit.models.detector import MapTap

PLAIN_STATISTICS = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)  # the published models take RGB values as they are


class RTDetrV2(TransformersDetector):
    """`transformers.RTDetrV2ForObjectDetection`. Settings: see `RTDetrV2Options`.

    The model does not mask padding, so all images must have one size, a multiple of 32, and fill it.

    Raises:
        BadInput: the backbone or `freeze` is unknown, the backbone does not have the strides, weights cannot be loaded,
            there are fewer than 2 decoder layers, `source_config` is of another model, or its backbone does not have an
            option that is set.
    """

    Options = RTDetrV2Options
    config_class = RTDetrV2Config
    model_class: type[PreTrainedModel] = RTDetrV2ForObjectDetection
    processor_class = RTDetrImageProcessor
    entries = {
        **ENCODER_DECODER,
        "d_model": ["d_model", "encoder_hidden_dim"],
        "num_denoising": ["num_denoising"],
        "hidden_expansion": ["hidden_expansion"],
        "varifocal_gamma": ["focal_loss_gamma"],
    }
    default_weights = {"loss_vfl": 1.0, "loss_bbox": 5.0, "loss_giou": 2.0}
    fixed_size = True
    graph_parts = ("model.model.backbone.model", "model.model.encoder")  # the decoder has queries of denoising
    stride = 32
    class_tensors = {  # the denoising embedding has its padding last
        "model.class_embed.*": (0, 1, 0),
        "model.model.decoder.class_embed.*": (0, 1, 0),
        "model.model.enc_score_head.*": (0, 1, 0),
        "model.model.denoising_class_embed.*": (0, 1, 1),
    }

    def __init__(self, class_names: Sequence[str], options: HybridOptions, *, source_config: Mapping | None = None):
        super().__init__()
        config, freeze = rt_detr_config(type(self), class_names, options, source_config)
        if config.decoder_layers < 2:
            raise BadInput(
                f"model.decoder_layers: {config.decoder_layers} is too few, transformers' {config.model_type} shares "
                "heads between two and more; use 2 or more."
            )
        self.model = self.model_class(config)
        self.model.loss_function = _no_loss_in_forward
        backbone = self._backbone()
        name = timm_name(config)
        initialise_rt_detr_(self.model, backbone)
        if name is not None:
            start_backbone(
                backbone._backbone,
                config.backbone_config,
                freeze,
                options.pretrained_backbone,
            )
        used = {"backbone": name, "freeze": freeze, "d_model": _one_width(config)}
        used = {option: value for option, value in used.items() if hasattr(options, option)}
        if config.backbone_config.model_type == "dinov3_vit":
            statistics = pixel_statistics(config, options)
        else:
            statistics = pixel_statistics(config, options, PLAIN_STATISTICS)
        set_loss = self._criterion(len(class_names), config, options)
        self._set_criterion(set_loss, statistics, used)

    def _criterion(self, num_classes: int, config: PreTrainedConfig, options: HybridOptions) -> nn.Module:
        return RTDetrCriterion(
            config.decoder_layers,
            config.num_denoising > 0,
            config.focal_loss_gamma,
        )

    def _backbone(self) -> nn.Module:
        return self.model.model.backbone.model

    def forward(self, images: Tensor, sizes: Tensor, targets: Sequence[Mapping] | None = None) -> dict:
        """Return predictions and, with targets, also the inputs of the loss; see `Detector.forward`.

        Args:
            images: height and width are multiples of 32, without padding.
            targets: per image, on the device of the images; in training, denoising queries are also made from them.

        Returns:
            `logits (B, Q, C)` and `boxes (B, Q, 4)` cxcywh as fractions of the image, for Q queries; with targets also
            `layers`, the input of `RTDetrCriterion.forward`.

        Raises:
            BadInput: the sides of the images are not multiples of 32, or the images have fewer positions than there are
                queries.
        """
        self._check_size(*images.shape[-2:])
        pixels = self.normalized(images, sizes, self.model.dtype)
        pixels = pixels.contiguous(memory_format=torch.channels_last)  # convolutions are a tenth faster
        waits = nullcontext()
        objects = targets
        if is_waited_for(images.device) and not torch.compiler.is_compiling():
            waits = without_host_waits(self.model.model, images.device)
            objects = [on_host(target) for target in targets or ()]
        labels = None
        if targets and self.training:  # they only make denoising queries
            labels = _transformers_targets([without_crowd(target) for target in objects])
        # Without denoising queries transformers keeps boxes in autocast's precision, in bfloat16 1/256 of the image:
        # evaluation is therefore in float32.
        with precision(self.training, images.device), waits:
            outputs = self.model(pixels, labels=labels)
        predictions = {"logits": outputs.logits, "boxes": outputs.pred_boxes}
        if targets is None:
            return predictions
        denoising = outputs.denoising_meta_values
        if denoising is not None:
            noisy, _ = denoising["dn_num_split"]  # the first queries are those of denoising
            predictions = {name: values[:, noisy:] for name, values in predictions.items()}
        return {**predictions, "layers": self._layers(outputs)}

    def map_taps(self) -> list[MapTap]:
        config = self.model.config
        return [
            MapTap(
                self.model.model.encoder,
                config.feat_strides,
                [config.encoder_hidden_dim] * len(config.feat_strides),
                lambda _, output: list(output[0]),
            )
        ]

    def last_layer(self, outputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        return outputs["logits"], outputs["boxes"]

    def _layers(self, outputs: Any) -> dict:
        return {
            "logits": outputs.intermediate_logits,
            "boxes": outputs.intermediate_reference_points,
            "encoder_logits": outputs.enc_topk_logits,
            "encoder_boxes": outputs.enc_topk_bboxes,
            "denoising": outputs.denoising_meta_values,
        }

    def _check_size(self, height: int, width: int) -> None:
        config = self.model.config
        if height % self.stride or width % self.stride:
            raise BadInput(f"images of {height}x{width} px: {config.model_type} needs sides that are multiples of 32.")
        positions = sum((height // stride) * (width // stride) for stride in config.feat_strides)
        check_positions(height, width, positions, config.num_queries)

    def denominators(self, targets: Sequence[Mapping]) -> dict[str, float]:
        """Return the number of boxes of this batch, without crowd regions, from targets on the CPU."""
        return {"boxes": float(sum(count_objects(targets)))}

    def criterion(self, outputs: Mapping, targets: Sequence[Mapping], denominators: Mapping):
        """Return `(losses, {})` for the outputs of `forward`; there are no metrics. See `RTDetrCriterion.forward`."""
        objects = [without_crowd(target) for target in targets]
        return self.set_loss(outputs["layers"], objects, denominators, self.class_weights), {}


def _one_width(config: PreTrainedConfig) -> int | None:
    """Return `d_model` if encoder and decoder have the same, else None."""
    widths = {config.d_model, config.encoder_hidden_dim, *config.decoder_in_channels}
    return config.d_model if len(widths) == 1 else None


def _no_loss_in_forward(*args, **kwargs):
    return None, None, None


def without_crowd(target: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the target without its crowd regions, which are not single objects."""
    host = on_host(target)
    if "iscrowd" not in host or not host["iscrowd"].any():
        return target
    rows = (host["iscrowd"] == 0).nonzero()[:, 0]
    keys = ("boxes", "labels", "iscrowd")
    cut = {key: host[key][rows] for key in keys}
    if host is target:
        return {**target, **cut}
    rows = send(rows, target["boxes"].device)
    return {
        **target,
        **{key: target[key][rows] for key in keys},
        "on_host": HostTarget({**host, **cut}),
    }


def _transformers_targets(targets: Sequence[Mapping[str, Tensor]]) -> list[dict[str, Tensor]]:
    counts = [len(target["labels"]) for target in targets]
    sizes_hw = [target["size"].expand(count, 2) for target, count in zip(targets, counts, strict=True)]
    boxes_xyxy = torch.cat([target["boxes"] for target in targets])
    fractions = normalize_boxes(boxes_xyxy[:, None], torch.cat(sizes_hw))  # one box an "image": (N, 1, 4)
    boxes_cxcywh = xyxy_to_cxcywh(fractions)[:, 0]
    result = []
    for target, boxes in zip(targets, boxes_cxcywh.split(counts), strict=True):
        result.append({"class_labels": target["labels"], "boxes": boxes})
    return result
