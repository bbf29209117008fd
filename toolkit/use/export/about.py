"""The metadata of an exported file, which make it usable by itself: classes, sizes, threshold."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from toolkit.data.table import Category
from toolkit.errors import BadInput

KEY = "detection_toolkit"  # of the metadata of an ONNX file, the extra files of a program, the information of OpenVINO

LARGEST_SIDE = 20_000  # pixels that an image may be resized to


@dataclass
class About:
    """Beside the numbers of an exported detector; written as JSON under `KEY`.

    categories: classes in the order of the labels, with the ids that the training data gave them.
    size: what an image is resized to before, bilinear with antialiasing, as transformers' processors spell it; None:
        images keep their size.
    sides: images that the file takes, "any", "multiples" of `stride`, or "fixed": those of `size`.
    score_threshold: from which on detections are meant to be used.
    top_k: rows of an image. source: what was exported.
    """

    architecture: str
    categories: Sequence[Category]
    size: Mapping[str, int] | None
    sides: str
    stride: int
    score_threshold: float
    top_k: int
    source: str
    image: str = "uint8 (B, 3, H, W), RGB"

    def to_text(self) -> str:
        """JSON."""
        classes = [{"id": each.id, "name": each.name} for each in self.categories]
        return json.dumps({**asdict(self), "categories": classes})

    @classmethod
    def from_text(cls, text: str | None, path) -> "About":
        """Raises BadInput for a file that this toolkit did not write."""
        try:
            entries = json.loads(text or "")
            entries["categories"] = [Category(each["id"], str(each["name"])) for each in entries["categories"]]
            entries["score_threshold"] = float(entries["score_threshold"])
            sides = (entries["size"] or {"none": 1}).values()
            if not all(isinstance(side, int) and 0 < side <= LARGEST_SIDE for side in sides):
                raise ValueError(f"size {entries['size']}")
            return cls(**entries)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise BadInput(
                f"{path}: it does not say what its classes and sizes are ({KEY} in its metadata); give a file that "
                "scripts/export.py wrote"
            ) from error


def trace_hw(sides: str, stride: int, size: Mapping[str, int] | None, architecture: str) -> tuple[int, int]:
    """The (h, w) of images to trace a detector with; the only ones afterwards where `sides` is "fixed".

    Raises:
        BadInput: one size is needed, but `size` gives images of many.
    """
    if size is not None and "height" in size:
        return size["height"], size["width"]
    if sides == "fixed":
        raise BadInput(
            f"{architecture} can be exported for images of one size only, but these keep their aspect ratio "
            "(data.scales of the run); give the size with --size HEIGHT WIDTH"
        )
    return -(-96 // stride) * stride, -(-128 // stride) * stride
