"""The pixels of masks that an exported file gives."""

from torch import Tensor

from toolkit.tools.export.exported_files import ExportMetadata


def paste_masks(about: ExportMetadata, masks: Tensor, boxes_xyxy: Tensor, size_hw: tuple[int, int]) -> Tensor:
    """Return what `Detector.paste_masks` of the exported detector does: pixels (K, H, W) bool of a picture.

    Args:
        about: metadata of the file.
        masks: (K, h, w) of one image, probabilities.
        boxes_xyxy: (K, 4) in pixels of the picture.
        size_hw: its height and width.
    """
    if about.masks == "box":
        from toolkit.detectors.faster_rcnn.mask_branch import pasted  # not both families for one file

        return pasted(masks, boxes_xyxy, size_hw)
    from toolkit.detectors.detr.rf_detr_masks import pasted

    return pasted(masks, size_hw)
