"""RT-DETR-v2 (Lv et al., 2024, arXiv 2407.17140) on any timm backbone: transformers' model, our criterion.

transformers computes the loss inside the model's forward, in whatever precision that runs in, already weighted, and
divided by the boxes of that batch. Here the forward only collects what the loss needs; `criterion` comes after it, in
float32, unweighted, divided by the denominators it is given. Its numbers are those of transformers' `RTDetrLoss`.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForObjectDetection, PreTrainedConfig, RTDetrImageProcessor, RTDetrV2Config
from transformers.image_utils import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

from toolkit.batch import normalize_images
from toolkit.boxes import cxcywh_to_xyxy, denormalize_boxes, normalize_boxes, xyxy_to_cxcywh
from toolkit.errors import BadInput
from toolkit.models.backbones import freeze_backbone, image_statistics, load_backbone_weights
from toolkit.models.detr.detr_criterion import count_objects
from toolkit.models.detr.rt_detr_build import family_config, initialise_as_published_
from toolkit.models.detr.rt_detr_criterion import RTDetrCriterion
from toolkit.models.final import save_transformers_folder


class RTDetrV2(nn.Module):
    """A detector (see docs/design.md) around `transformers.RTDetrV2ForObjectDetection`.

    It ignores padding, so images must all have one size, a multiple of 32, and fill it.

    Args:
        class_names: one name per class, in the order of the labels.
        source_config: `to_dict()` of a transformers config, of a model on the hub for example: the model is built from
            it, backbone included, with these classes, and the options below that are given override its entries.
        backbone: name of a timm model with feature maps of stride 8, 16 and 32.
        pretrained_backbone: True (timm's, downloaded once), False (random), or the path of a file.
        freeze: "none" (batch norms learn), "norms", or "paper" (also stem and first stage; of timm backbones only);
            see `freeze_backbone`.
        d_model: width of encoder and decoder.
        num_queries: detections per image; at most the number of positions in the feature maps.
        num_denoising: denoising queries in training; 0: none.
        hidden_expansion: width of the encoder's convolution blocks as a fraction of d_model.
        varifocal_gamma: see `RTDetrCriterion`; 1 tells classes apart sooner when training from random weights.
        encoder_layers, decoder_layers (2 or more), heads, ffn_dim, dropout: the transformer.
        mean, std: of RGB values in [0, 1]; None: those the backbone was trained with.

    An option that is None has its published value (`published`), or that of `source_config`.

    Raises:
        BadInput: unknown backbone or `freeze`, missing strides, weights that cannot be had, fewer than 2 decoder
            layers, a `source_config` of another model, or options that its backbone does not have.
    """

    default_weights = {"loss_vfl": 1.0, "loss_bbox": 5.0, "loss_giou": 2.0}
    denominator_names = ("boxes",)
    averaged_denominators = ("boxes",)  # by rank, in the original
    metric_names = ()
    fixed_size = True
    stride = 32
    class_tensors = {  # see finetune.py; the denoising embedding has its padding last
        "model.class_embed.*": (0, 1, 0),
        "model.model.decoder.class_embed.*": (0, 1, 0),
        "model.model.enc_score_head.*": (0, 1, 0),
        "model.model.denoising_class_embed.*": (0, 1, 1),
    }
    config_class = RTDetrV2Config
    published = {
        "backbone": "resnet18d",
        "freeze": "norms",
        "d_model": 256,
        "heads": 8,
        "encoder_layers": 1,
        "decoder_layers": 6,
        "ffn_dim": 1024,
        "num_queries": 300,
        "num_denoising": 100,
        "hidden_expansion": 1.0,
        "varifocal_gamma": 2.0,
        "dropout": 0.0,
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
        varifocal_gamma: float | None = None,
        dropout: float | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
    ):
        super().__init__()
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
            "varifocal_gamma": varifocal_gamma,
            "dropout": dropout,
        }
        config = self._build(class_names, source_config, options, mean, std)
        self.set_loss = RTDetrCriterion(
            len(class_names), config.decoder_layers, config.num_denoising > 0, config.focal_loss_gamma
        )
        self.loss_names = self.set_loss.loss_names

    def _build(
        self,
        class_names: Sequence[str],
        source_config: Mapping[str, Any] | None,
        options: Mapping[str, Any],
        mean: Sequence[float] | None,
        std: Sequence[float] | None,
    ) -> PreTrainedConfig:
        """Makes `model`, its weights, `mean` and `std`; returns its config."""
        config, timm_name, freeze = family_config(
            self.config_class, self.published, class_names, source_config, options
        )
        if config.decoder_layers < 2:
            raise BadInput(
                f"model.decoder_layers: {config.decoder_layers} is too few, transformers' {config.model_type} shares "
                "heads between two and more; use 2 or more."
            )
        self.model = AutoModelForObjectDetection.from_config(config)
        backbone = self._backbone()
        initialise_as_published_(self.model, backbone)
        if timm_name is not None:
            pretrained = options["pretrained_backbone"]
            load_backbone_weights(backbone._backbone, config.backbone_config, pretrained)
            freeze_backbone(backbone._backbone, timm_name, freeze, pretrained)
            own_mean, own_std = image_statistics(timm_name)
        elif config.backbone_config.model_type == "dinov3_vit":
            own_mean, own_std = IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
        else:  # the published models take RGB values in [0, 1] as they are
            own_mean, own_std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
        self.model.loss_function = _no_loss_in_forward
        self.mean, self.std = tuple(mean or own_mean), tuple(std or own_std)
        return config

    def _backbone(self) -> nn.Module:
        return self.model.model.backbone.model

    def forward(self, images: Tensor, sizes: Tensor, targets: Sequence[Mapping] | None = None) -> dict:
        """Predictions, and with targets what the loss needs beside them.

        Args:
            images: `(B, 3, H, W)` uint8, H and W multiples of 32, without padding.
            sizes: `(B, 2)` int64, height and width of each image.
            targets: per image, on the device of the images; in training they also make the denoising queries.

        Returns:
            `logits (B, Q, C)` and `boxes (B, Q, 4)` cxcywh as fractions of the image; with targets also `layers`, what
            `RTDetrCriterion.forward` takes.

        Raises:
            BadInput: images of another size, or smaller than the number of queries allows.
        """
        self._check_size(*images.shape[-2:])
        pixels = normalize_images(images, sizes, self.mean, self.std, dtype=self.model.dtype)
        pixels = pixels.contiguous(memory_format=torch.channels_last)  # convolutions are a tenth faster
        labels = None if targets is None else [_transformers_target(target) for target in map(without_crowd, targets)]
        # Without denoising queries transformers keeps boxes in autocast's precision, in bfloat16 1/256 of the image:
        # evaluation is therefore in float32.
        precision = nullcontext() if self.training else torch.autocast(images.device.type, enabled=False)
        with precision:
            outputs = self.model(pixels, labels=labels)
        predictions = {"logits": outputs.logits, "boxes": outputs.pred_boxes}
        if targets is None:
            return predictions
        denoising = outputs.denoising_meta_values
        if denoising is not None:
            predictions = {k: v[:, denoising["dn_num_split"][0] :] for k, v in predictions.items()}
        return predictions | {"layers": self._layers(outputs)}

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
        if positions < config.num_queries:
            raise BadInput(
                f"model.num_queries {config.num_queries}: images of {height}x{width} px have only "
                f"{positions} positions; use larger images or fewer queries."
            )

    def denominators(self, targets: Sequence[Mapping]) -> dict[str, float]:
        """This batch's number of boxes, from CPU targets; crowd regions are not counted."""
        return {"boxes": float(sum(count_objects(targets)))}

    def criterion(self, outputs: Mapping, targets: Sequence[Mapping], denominators: Mapping):
        """Losses of `forward`'s outputs, `(losses, {})`: there are no metrics; see `RTDetrCriterion.forward`."""
        return self.set_loss(outputs["layers"], list(map(without_crowd, targets)), denominators["boxes"]), {}

    def postprocess(
        self,
        outputs: Mapping[str, Tensor],
        sizes: Tensor,
        orig_sizes: Tensor,
        score_threshold: float = 0.0,
        top_k: int = 100,
    ) -> list[dict[str, Tensor]]:
        """The `top_k` best pairs of query and class, best first, as transformers' RT-DETR image processor chooses them.

        Returns, per image, on the device: `boxes (K, 4)` xyxy in pixels of the original image, float32, not clipped;
        `scores (K,)`; `labels (K,)` int64. Only scores above `score_threshold`.
        """
        probabilities = outputs["logits"].float().sigmoid()
        num_classes = probabilities.shape[-1]
        scores, chosen = probabilities.flatten(1).topk(min(top_k, probabilities[0].numel()), dim=1)
        queries = (chosen // num_classes)[..., None].expand(-1, -1, 4)
        boxes = denormalize_boxes(cxcywh_to_xyxy(outputs["boxes"].float()), orig_sizes).gather(1, queries)
        keep = scores > score_threshold
        return [
            {"boxes": b[k], "scores": s[k], "labels": c[k] % num_classes}
            for b, s, c, k in zip(boxes, scores, chosen, keep, strict=True)
        ]

    def save_final(self, folder: Path, categories: Sequence, processor_size: Mapping[str, int] | None = None) -> None:
        """Write a folder that `AutoModelForObjectDetection.from_pretrained(folder)` loads; see `Detr.save_final`.

        `processor_size` is `{"height": ..., "width": ...}` in pixels, that of the evaluation.
        """
        processor = RTDetrImageProcessor(
            do_normalize=True,
            image_mean=list(self.mean),
            image_std=list(self.std),
            do_resize=processor_size is not None,
        )
        save_transformers_folder(self.model, processor, processor_size, folder, categories)


def _no_loss_in_forward(*args, **kwargs):
    return None, None, None


def without_crowd(target: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The target without its crowd regions, which are not objects to be found one by one."""
    if "iscrowd" not in target or len(target["labels"]) == 0:
        return target
    single = target["iscrowd"] == 0
    return {**target, **{key: target[key][single] for key in ("boxes", "labels", "iscrowd")}}


def _transformers_target(target: Mapping[str, Tensor]) -> dict[str, Tensor]:
    boxes = xyxy_to_cxcywh(normalize_boxes(target["boxes"], target["size"]))
    return {"class_labels": target["labels"], "boxes": boxes}
