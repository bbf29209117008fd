"""LW-DETR (Chen et al., 2024, arXiv 2406.03459) on its own vision transformer, whose attention alternates between
windows and the whole image: transformers' model with the losses of this toolkit."""

import copy
from collections.abc import Mapping
from typing import Any

from transformers import DeformableDetrImageProcessor, LwDetrConfig, LwDetrForObjectDetection

from toolkit.base.errors import BadInput
from toolkit.detectors.detr.configuration import FOLLOW_FROM_DEPTH, handed_over, without_layers_behind_maps
from toolkit.detectors.detr.group_detr import GroupDetr
from toolkit.detectors.detr.options import LwDetrOptions
from toolkit.detectors.detr.sizes import LW_DETR_BACKBONE_FILES, LW_DETR_SIZES, lw_detr_vit, size_of
from toolkit.detectors.detr.weights_lw_detr import vit_names
from toolkit.models.detector import MapTap
from toolkit.models.weights.backbone_file import load_publishers_file

OF_A_SIZE = ("encoder_layers", "num_queries", "d_model", "heads")  # settings that follow from the size


class LwDetr(GroupDetr):
    """`transformers.LwDetrForObjectDetection`. Settings: see `LwDetrOptions`.

    The sides of images are multiples of patch size times windows (64 px).
    """

    Options = LwDetrOptions
    config_class = LwDetrConfig
    model_class = LwDetrForObjectDetection
    processor_class = DeformableDetrImageProcessor

    @property
    def stride(self) -> int:
        backbone = self.model.config.backbone_config
        return backbone.patch_size * backbone.num_windows_side

    def _entries(self, options: LwDetrOptions, source_config: Mapping | None) -> dict[str, Any]:
        values = handed_over(options, source_config)
        if source_config is None:
            return self._entries_of_size(values, options)
        entries = self._decoder_entries(values)
        vit = dict(source_config.get("backbone_config") or {})  # a config of another architecture is refused later
        used = without_layers_behind_maps(vit)
        layers = values.get("encoder_layers")
        if layers in (None, vit.get("num_hidden_layers"), used.get("num_hidden_layers")):
            return entries | {"backbone_config": used}
        heads = vit["num_attention_heads"]
        vit |= lw_detr_vit(vit["hidden_size"], layers)
        vit["num_attention_heads"] = heads
        for name in FOLLOW_FROM_DEPTH:
            vit.pop(name, None)
        return entries | {"backbone_config": vit}

    def _entries_of_size(self, values: dict[str, Any], options: LwDetrOptions) -> dict[str, Any]:
        if options.size not in LW_DETR_SIZES:
            raise BadInput(f"model.size: {options.size!r} is not one of {', '.join(LW_DETR_SIZES)}.")
        size = copy.deepcopy(LW_DETR_SIZES[options.size])
        of_user = {name: value for name, value in values.items() if name in options.given or name not in OF_A_SIZE}
        entries = size | self._decoder_entries(of_user)
        if "encoder_layers" in of_user:
            entries["backbone_config"] = lw_detr_vit(
                size["backbone_config"]["hidden_size"],
                of_user["encoder_layers"],
            )
        return entries

    def _initialise(self, options: LwDetrOptions, source_config: Mapping | None) -> None:
        super()._initialise(options, source_config)
        self.model.model.backbone.backbone.embeddings.projection.reset_parameters()  # the rest is as in transformers

    def _start_backbone(self, options: LwDetrOptions) -> None:
        file = options.pretrained_backbone
        if file:
            vit = self.model.model.backbone.backbone
            width = vit.config.hidden_size
            published = LW_DETR_BACKBONE_FILES.get(width, "there is none of this width")
            load_publishers_file(vit, file, vit_names, f"LW-DETR of width {width}", published)

    def _size_of(self, config: LwDetrConfig) -> str | None:
        return size_of(config.to_dict(), LW_DETR_SIZES, ["backbone_config", "projector_scale_factors"])

    @property
    def feature_strides(self) -> list[int]:
        config = self.model.config
        return [round(config.backbone_config.patch_size / scale) for scale in config.projector_scale_factors]

    def map_taps(self) -> list[MapTap]:
        strides = self.feature_strides
        projector = self.model.model.backbone.projector
        return [MapTap(projector, strides, [self.model.config.d_model] * len(strides))]
