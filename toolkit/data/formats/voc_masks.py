"""Pictures of Pascal VOC's folder `SegmentationObject`, read and written: each pixel has the number of its object."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from toolkit.base.files import MAX_IMAGE_PIXELS
from toolkit.base.masks import Shape, Size, bitmap
from toolkit.data.decoding import ImageError, probe_image

MASK_FOLDER = "SegmentationObject"
VOID = 255  # pixels on the borders between objects, which belong to none
MOST_OBJECTS = 254  # of an image, whose numbers fit into a byte beside those of background and void


@dataclass(frozen=True)
class ObjectNumbers:
    """The numbers of the objects of one image, (H, W) uint8, 0 for the background; or why they cannot be read."""

    numbers: np.ndarray | None
    fault: str = ""

    def of_object(self, place: int) -> object:
        """Return the mask of the object at this place in the XML file, from 1, as a value of COCO's `segmentation`.

        Returns None if it has no pixel, or if the numbers cannot be read.
        """
        if self.numbers is None:
            return None
        from pycocotools import mask as coco_mask  # here, so that those who train boxes need not import it

        pixels = self.numbers == place
        if place > MOST_OBJECTS or not pixels.any():
            return None
        return coco_mask.encode(np.asfortranarray(pixels, np.uint8))


def masks_of_objects(file: Path, max_pixels: int = MAX_IMAGE_PIXELS) -> list[ObjectNumbers]:
    """Read a picture of numbers: with a palette, grey, or in the colours of VOC's palette, as CVAT writes it.

    Returns a list of one, as `toolkit.data.check_files.map_in_threads` expects it. max_pixels: a larger picture is not
    read.
    """
    if not file.is_file():
        return [ObjectNumbers(None, f"there is no {MASK_FOLDER}/{file.name}")]
    try:
        probe_image(file, max_pixels)
        with Image.open(file) as image:
            if image.mode in ("P", "L"):
                return [ObjectNumbers(np.array(image))]
            colours = np.array(image.convert("RGB")).astype(np.int64)
    except ImageError as error:
        return [ObjectNumbers(None, f"{MASK_FOLDER}/{file.name}: {error.reason}")]
    except (OSError, ValueError, SyntaxError) as error:  # a cut or damaged file
        return [ObjectNumbers(None, f"{MASK_FOLDER}/{file.name} cannot be read: {error}")]
    codes = colours @ [2**16, 2**8, 1]
    of_palette = palette().astype(np.int64) @ [2**16, 2**8, 1]
    order = np.argsort(of_palette)
    at = np.searchsorted(of_palette[order], codes).clip(max=255)
    numbers = order[at]
    if (of_palette[numbers] != codes).any():
        return [ObjectNumbers(None, f"{MASK_FOLDER}/{file.name} has colours that are not of VOC's palette")]
    return [ObjectNumbers(numbers.astype(np.uint8))]


def palette() -> np.ndarray:
    """Return the 256 colours of VOC's palette, (256, 3) uint8 RGB: the bits of a number, spread over the colours."""
    numbers = np.arange(256)
    colours = np.zeros((256, 3), int)
    for place in range(8):
        for channel in range(3):
            bit = numbers >> (3 * place + channel) & 1
            colours[:, channel] |= bit << (7 - place)
    return colours.astype(np.uint8)


def write_masks(shapes: list[Shape], size_hw: Size, file: Path) -> None:
    """Write the numbers of the first `MOST_OBJECTS` objects of an image; of two in one place, the later one counts."""
    numbers = np.zeros(size_hw, np.uint8)
    for place, shape in enumerate(shapes[:MOST_OBJECTS], start=1):
        numbers[bitmap(shape, size_hw) > 0] = place
    image = Image.fromarray(numbers, mode="P")
    image.putpalette(palette().tobytes())
    file.parent.mkdir(parents=True, exist_ok=True)
    image.save(file)
