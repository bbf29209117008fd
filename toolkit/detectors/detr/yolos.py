"""YOLOS (Fang et al., NeurIPS 2021): a plain ViT with detection tokens; transformers' model, DETR's losses."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers import YolosConfig, YolosForObjectDetection, YolosImageProcessor

from toolkit.base.batch import normalize_images
from toolkit.base.errors import BadInput
from toolkit.detectors.detr.base import precision
from toolkit.detectors.detr.configuration import handed_over, to_entries
from toolkit.detectors.detr.detr import Detr
from toolkit.detectors.detr.options import YolosOptions
from toolkit.models.detector import MapTap
from toolkit.models.weights import vit as vit_weights

DEIT = {192: "deit_tiny_patch16_224", 384: "deit_small_patch16_224", 768: "deit_base_patch16_224"}


class Yolos(Detr):
    """`transformers.YolosForObjectDetection`, with losses of the last layer only. Settings: see `YolosOptions`.

    It ignores padding, so images must all have one size and fill it. Position embeddings are those of `image_size` in
    the config (YOLOS-Ti: 800 x 1333 px), interpolated to the images at every forward. The pretrained backbone is timm's
    DeiT of the same width.
    """

    Options = YolosOptions
    config_class, model_class, processor_class = YolosConfig, YolosForObjectDetection, YolosImageProcessor
    entries = {
        "d_model": ["hidden_size"],
        "heads": ["num_attention_heads"],
        "encoder_layers": ["num_hidden_layers"],
        "ffn_dim": ["intermediate_size"],
        "num_queries": ["num_detection_tokens"],
        "dropout": ["hidden_dropout_prob"],
        "eos_coef": ["eos_coefficient"],
    }
    published = {"layer_norm_eps": 1e-6, "image_size": [800, 1333], "use_mid_position_embeddings": False}
    class_tensors = {"model.class_labels_classifier.layers.2.*": (0, 1, 1)}  # no-object last
    fixed_size = True

    def _entries(self, options: YolosOptions, source_config: Mapping | None) -> dict:
        return to_entries(handed_over(options, source_config), self.entries)

    def _initialise(self, options: YolosOptions, source_config: Mapping | None) -> None:
        """Draw weights as hustvl/YOLOS does. transformers leaves detection tokens and position embeddings at 0: all
        tokens stay identical and never learn to differ."""
        vit = self.model.vit
        for module in vit.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)
        vit.embeddings.patch_embeddings.projection.reset_parameters()
        tokens = [vit.embeddings.cls_token, vit.embeddings.detection_tokens, vit.embeddings.position_embeddings]
        if self.model.config.use_mid_position_embeddings:
            tokens.append(vit.encoder.interpolation.mid_position_embeddings)
        for parameter in tokens:
            nn.init.trunc_normal_(parameter, std=0.02)
        for layer in (*self.model.class_labels_classifier.layers, *self.model.bbox_predictor.layers):
            layer.reset_parameters()

    def _prepare_backbone(self, options: YolosOptions, source_config: Mapping | None) -> dict:
        config = self.model.config
        self.stride = config.patch_size
        if options.pretrained_backbone:
            grid_hw = tuple(side // config.patch_size for side in config.image_size)
            pretrained = options.pretrained_backbone
            vit_weights.load_timm_vit(self.model.vit, DEIT, pretrained, vit_weights.YOLOS, grid_hw)
        return {}

    def forward(self, images: Tensor, sizes: Tensor, targets: Sequence[Mapping] | None = None) -> dict[str, Tensor]:
        """Return `logits (1, B, Q, C + 1)` and `boxes (1, B, Q, 4)`; see `Detr.forward`."""
        if any(side % self.stride for side in images.shape[-2:]):
            height, width = images.shape[-2:]
            raise BadInput(f"images of {height}x{width} px: yolos needs both sides to be multiples of {self.stride}.")
        pixels = normalize_images(images, sizes, self.mean, self.std, dtype=self.model.dtype)
        with precision(self.training, images.device):
            states = self.model.vit(pixels).last_hidden_state[None, :, -self.model.config.num_detection_tokens :]
        with torch.autocast(images.device.type, enabled=False):
            states = states.to(self.model.dtype)
            logits = self.model.class_labels_classifier(states)
            return {"logits": logits, "boxes": self.model.bbox_predictor(states).sigmoid()}

    def map_taps(self) -> list[MapTap]:
        """Return taps of the image's patch tokens: the class token precedes them, the detection tokens follow."""

        def patches(arguments: tuple, output) -> list[Tensor]:
            grid_hw = [side // self.stride for side in arguments[0].shape[-2:]]
            tokens = output.last_hidden_state[:, 1 : 1 + grid_hw[0] * grid_hw[1]]
            return [tokens.transpose(1, 2).unflatten(2, grid_hw)]

        return [MapTap(self.model.vit, [self.stride], [self.model.config.hidden_size], patches)]
