"""Small settings of every detector that a scene graph can stand on."""

from small_detectors import TRANSFORMER as WIDTHS

TRANSFORMER = {"backbone": "test_resnet", **WIDTHS, "encoder_layers": 1, "num_queries": 20}
HYBRID = TRANSFORMER | {"hidden_expansion": 0.5, "num_denoising": 4, "freeze": "none"}
OWN_BACKBONE = {
    "d_model": 32,
    "heads": 2,
    "decoder_layers": 1,
    "ffn_dim": 32,
    "num_queries": 12,
}
SINGLE_SHOT = {
    "backbone": "lcnet_035",
    "strides": [8, 16, 32],
    "channels": [16] * 3,
    "aspect_ratios": [[2.0]] * 3,
}
SMALL_BELOW = {
    "yolov3": {"backbone": "lcnet_035", "head_channels": [8, 8, 8]},
    "rt_detr_v2": HYBRID,
    "ssd": SINGLE_SHOT,
    "detr": TRANSFORMER,
    "conditional_detr": TRANSFORMER,
    "deformable_detr": TRANSFORMER,
    "dab-detr": TRANSFORMER,
    "d_fine": HYBRID,
    "deimv2": HYBRID,
    "ecdet": {name: value for name, value in HYBRID.items() if name not in ("backbone", "freeze")},
    "rf_detr": {**OWN_BACKBONE, "encoder_layers": 4},
    "lw_detr": {**OWN_BACKBONE, "size": "tiny", "encoder_layers": 2},
    "ssdlite": SINGLE_SHOT,
    "ssd300_vgg16": {},
    "ssdlite320_mobilenet_v3_large": {},
}
FAST = ("yolov3", "rt_detr_v2")  # those that the fast tests stand on
