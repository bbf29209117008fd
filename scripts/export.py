"""Write a trained detector for programs without Python: ONNX and torch.export, from pixels to boxes, checked.

    python scripts/export.py runs/yolov3 --out exported
    python scripts/export.py runs/yolov3/final --out exported --nms --check-on photos/

`exported/` then holds `model.onnx` (opset 18) and `model.pt2` (torch.export): from images uint8 (B, 3, H, W), RGB,
resized to sides that are multiples of 32, to boxes (B, N, 4) xyxy in their pixels and scores (B, N, C). With `--nms`
there is `model_nms.onnx`, too: to the best boxes, scores and labels. The first two are held to PyTorch's numbers on the
images of `--check-on`, or on noise. `categories.json` says which label is which class.

YOLOv3 can be exported. The DETR family, Faster R-CNN, SSD and scene graphs cannot yet: of a DETR, `final/` is a
transformers folder, which other tools export. Exit code 0: written and checked, 2: bad input.
"""

import argparse
import json
import sys
from pathlib import Path

import torch

from toolkit.data.decoding import ImageError, decode_image
from toolkit.data.transforms.geometry import resize
from toolkit.errors import BadInput
from toolkit.use.export import check_exportable, export_final
from toolkit.use.prediction import find_images, input_hw, open_own_detector

CHECKED_IMAGES = 4


def export(arguments: argparse.Namespace) -> None:
    own = open_own_detector(arguments.model, arguments.weights)
    if own is None:
        raise BadInput(f"{arguments.model}: a model of transformers cannot be exported; YOLOv3 can")
    check_exportable(own.detector)
    images = images_to_check(arguments.check_on, input_hw((320, 320), own.size))
    try:
        arguments.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"--out {arguments.out}: cannot be written: {error.strerror}") from error
    print(export_final(own.detector, arguments.out, images))
    if arguments.nms:
        from toolkit.use.export.yolov3 import export_onnx  # takes seconds

        export_onnx(own.detector, arguments.out / "model_nms.onnx", nms=True, top_k=arguments.top_k)
    classes = [{"label": label, "id": each.id, "name": each.name} for label, each in enumerate(own.categories)]
    (arguments.out / "categories.json").write_text(json.dumps(classes, indent=2) + "\n")
    print(f"written: {', '.join(sorted(path.name for path in arguments.out.iterdir()))} in {arguments.out}")


def images_to_check(given: list[str], size_hw: tuple[int, int]) -> torch.Tensor:
    """uint8 (B, 3, H, W): the first images given, resized as for the detector, or noise."""
    if not given:
        return torch.randint(256, (2, 3, *size_hw), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    no_boxes = {"boxes": torch.zeros(0, 4), "area": torch.zeros(0)}
    try:
        decoded = [decode_image(path) for path in list(find_images(given))[:CHECKED_IMAGES]]
    except ImageError as error:
        raise BadInput(f"--check-on: {error}") from error
    return torch.stack([resize(image, no_boxes, size_hw)[0] for image in decoded])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="run folder, checkpoint or final/ folder")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--weights", choices=("model", "ema"), help="raw or averaged weights of a run")
    parser.add_argument("--nms", action="store_true", help="also an ONNX file that suppresses overlapping boxes")
    parser.add_argument("--top-k", type=int, default=100, help="detections of an image with --nms (default 100)")
    parser.add_argument("--check-on", nargs="+", default=[], metavar="IMAGES", help="image files, folders, patterns")
    try:
        export(parser.parse_args(argv))
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
