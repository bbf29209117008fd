"""Small data sets in every format: pictures of noise with the box `BOX` of the class `a`, unless a test says more."""

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from PIL import Image

from toolkit.data.table import DetectionTable

SIZE = (100, 80)
BOX = [40.0, 32.0, 60.0, 48.0]  # x1, y1, x2, y2 in pixels
YOLO_ROW = "0 .5 .5 .2 .2\n"  # the same box
YOLO_YAML = "names: [a]\ntrain: images\nval: images\n"
CSV_HEAD = "image,x1,y1,x2,y2,label\n"


def picture(path: Path, seed: int = 0, size_wh: tuple[int, int] = SIZE) -> Path:
    """Write noise; each seed is another picture."""
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(seed).integers(0, 255, (*size_wh[::-1], 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    return path


def write_text(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def coco_text(names: Iterable[str], **lists: object) -> str:
    """Return a COCO file of these images; lists: further keys, or others than those of one class."""
    images = []
    annotations = []
    for number, name in enumerate(names, start=1):
        images.append({"id": number, "file_name": name, "width": SIZE[0], "height": SIZE[1]})
        box = {
            "id": number,
            "image_id": number,
            "category_id": 1,
            "bbox": [40, 32, 20, 16],
        }
        annotations.append(box | {"area": 320, "iscrowd": 0})
    document = {
        "images": images,
        "annotations": annotations,
        "categories": [{"id": 1, "name": "a"}],
    }
    return json.dumps(document | lists)


def voc_text(name: str, extra: str = "", box: Iterable = BOX, label: str = "a") -> str:
    """Return the annotation of an image; extra: further elements."""
    corners = ""
    for tag, value in zip(("xmin", "ymin", "xmax", "ymax"), box, strict=True):
        corners += f"<{tag}>{value}</{tag}>"
    entry = f"<object><name>{label}</name><bndbox>{corners}</bndbox></object>"
    return f"<annotation><filename>{name}</filename>{extra}{entry}</annotation>"


def csv_text(names: Iterable[str]) -> str:
    return CSV_HEAD + "".join(f"{name},40,32,60,48,a\n" for name in names)


def yolo_folder(folder: Path, labels: dict[str, str], settings: str | None = YOLO_YAML) -> Path:
    """Write `labels`, the text of each image by its name, with pictures and a data.yaml."""
    for seed, (name, text) in enumerate(labels.items()):
        picture(folder / "images" / f"{name}.png", seed)
        write_text(folder / "labels" / f"{name}.txt", text)
    if settings is not None:
        write_text(folder / "data.yaml", settings)
    return folder


def one_image_folder(folder: Path, format: str) -> Path:
    """Write a data set of the one image `images/a.png` in the format yolo, csv, coco or voc."""
    picture(folder / "images" / "a.png")
    if format == "yolo":
        write_text(folder / "labels" / "a.txt", YOLO_ROW)
    elif format == "csv":
        write_text(folder / "boxes.csv", csv_text(["a.png"]))
    elif format == "coco":
        write_text(folder / "boxes.json", coco_text(["images/a.png"]))
    else:
        write_text(folder / "Annotations" / "a.xml", voc_text("a.png"))
    return folder


def boxes_of(table: DetectionTable) -> list[list[list[float]]]:
    """Return the boxes of each image, in whole pixels."""
    boxes = table.boxes()
    return [boxes.xyxy[boxes.of_image(index)].round().tolist() for index in range(len(table))]
