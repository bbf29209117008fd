"""Settings of detectors as run folders and `final/` folders of earlier versions spell them, in today's names."""

from collections.abc import Mapping

SUPPRESSION = {"nms_iou": "nms_threshold", "min_score": "score_threshold"}
TORCHVISION = {
    "box_nms_thresh": "nms_threshold",
    "box_score_thresh": "score_threshold",
    "box_detections_per_img": "detections_per_image",
}
OLD_NAMES = {
    "ssd": SUPPRESSION,
    "ssdlite": SUPPRESSION,
    "yolov3": SUPPRESSION,
    "faster_rcnn": TORCHVISION,
    "fasterrcnn_resnet50_fpn_v2": TORCHVISION,
}


def renamed(architecture: str, settings: Mapping) -> dict:
    """The settings of a model under today's names; those that were not given, which were None, are left out.

    Args:
        architecture: of the detector that the settings are of.
        settings: section `model` of a `config.yaml`, or of the `config.json` of a `final/` folder, of any version;
            today's come out as they are.
    """
    names = OLD_NAMES.get(architecture, {})
    found = {names.get(key, key): value for key, value in settings.items() if value is not None}
    if isinstance(inner := found.get("detector_options"), Mapping):  # of scene graphs
        found["detector_options"] = renamed(inner.get("architecture", "faster_rcnn"), inner)
    return found
