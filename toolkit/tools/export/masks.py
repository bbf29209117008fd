"""The pixels of masks that an exported file gives."""

from dataclasses import dataclass

from torch import Tensor

from toolkit.models.pasted_masks import masks_in_boxes, masks_over_image
from toolkit.tools.export.exported_files import ExportMetadata


@dataclass
class ExportedMasks:
    """The part of an exported file's detector that turns masks into pixels. about: metadata of the file."""

    about: ExportMetadata

    def paste_masks(self, masks: Tensor, boxes_xyxy: Tensor, size_hw: tuple[int, int]) -> Tensor:
        """Return what `Detector.paste_masks` of the exported detector does."""
        if self.about.masks == "box":
            return masks_in_boxes(masks, boxes_xyxy, size_hw)
        return masks_over_image(masks, size_hw)
