"""What was found in images, in the formats that other programs read."""

import csv
import functools
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

from toolkit.data.table import Category
from toolkit.errors import BadInput
from toolkit.evaluation.graph_formats import SUFFIXES, graph_text
from toolkit.files import write_text_atomic

# What `scripts/predict.py` writes below its folder.
OUTPUTS = ("predictions.json", "predictions.jsonl", "results.json", "predictions.csv", "labels", "annotations",
           "pictures", "videos", "graphs")  # fmt: skip
FORMATS = ("json", "jsonl", "coco", "yolo", "voc", "csv", *SUFFIXES)


def write_outputs(document: Mapping, names: Sequence[Path], formats: Sequence[str], folder: Path) -> list[Path]:
    """Writes a document in every format, and returns the files or folders.

    Args:
        document: as in predictions.json, see scripts/predict.py.
        names: a relative path for each of its images, all different, from which files of their own are named.
        formats: of `FORMATS`: json, predictions.json; jsonl, the same with a line for each image; coco, the list of
            COCO's results; yolo, a text file for each image with class, centre and size as shares of the image, and
            score; voc, an XML file for each image; csv, a row for each detection; and of scene graphs a file for each
            image in graphs/: dot (Graphviz), jsonld (linked data), networkx (its node-link JSON).
    """
    writers = {"json": _json, "jsonl": _jsonl, "coco": _coco, "yolo": _yolo, "voc": _voc, "csv": _csv}
    writers |= {name: functools.partial(_graphs, format=name) for name in SUFFIXES}
    folder.mkdir(parents=True, exist_ok=True)
    return [writers[name](document, names, folder) for name in formats]


def image_ids_of(annotations: Path | None, names: Sequence[Path]) -> list:
    """The id of each image: that of a COCO file, by the end of its path; without a file 1, 2, 3, ...

    Raises:
        BadInput: no COCO file, or images that it does not have, or has twice.
    """
    if annotations is None:
        return list(range(1, len(names) + 1))
    try:
        images = json.loads(Path(annotations).read_text())["images"]
        known = [(Path(each["file_name"]).parts, each["id"]) for each in images]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(f"--image-ids {annotations}: no COCO file with images: {error!r}") from error
    ids, problems, by_name = [], [], {}
    for parts, image_id in known:
        by_name.setdefault(parts[-1], []).append((parts, image_id))
    for name in names:
        found = [image_id for parts, image_id in by_name.get(name.name, ()) if name.parts[-len(parts) :] == parts]
        ids.append(found[0] if found else None)
        if len(found) != 1:
            problems.append(f"{name}: {annotations} names {len(found)} such images; expected 1")
    if problems:
        raise BadInput(problems)
    return ids


def check_outputs(folder: Path, inputs: Sequence[Path], overwrite: bool) -> None:
    """Makes sure that the results of two predictions are not mixed.

    Raises:
        BadInput: there are results already and `overwrite` is false; an input lies among them.
    """
    old = _earlier(folder)
    resolved = {path.resolve() for path in old}
    lost = [path for path in inputs if resolved & {path.resolve(), *path.resolve().parents}]
    if lost:
        raise BadInput([f"{path}: a new prediction would overwrite it; choose another --out" for path in lost])
    if old and not overwrite:
        raise BadInput(f"--out {folder} holds an earlier prediction ({', '.join(path.name for path in old)}): choose "
                       "another folder, or replace it with --overwrite")  # fmt: skip


def clear_outputs(folder: Path) -> None:
    """Removes what an earlier prediction wrote."""
    for path in _earlier(folder):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _earlier(folder: Path) -> list[Path]:
    return [folder / name for name in OUTPUTS if (folder / name).exists()]


def _json(document: Mapping, names: Sequence[Path], folder: Path) -> Path:
    path = folder / "predictions.json"
    write_text_atomic(path, as_text(document))
    return path


def as_text(document: Mapping) -> str:
    """JSON with a line for each image."""
    lists = {key: ",\n  ".join(json.dumps(each) for each in document[key]) for key in ("images", "errors")}
    lines = [f"{json.dumps(key)}: " + (f"[\n  {lists[key]}]" if lists.get(key) else json.dumps(value))
             for key, value in document.items()]  # fmt: skip
    return "{" + ",\n".join(lines) + "}\n"


def _jsonl(document: Mapping, names: Sequence[Path], folder: Path) -> Path:
    path = folder / "predictions.jsonl"
    write_text_atomic(path, "".join(json.dumps(each) + "\n" for each in document["images"]))
    return path


def _coco(document: Mapping, names: Sequence[Path], folder: Path) -> Path:
    results = [
        {"image_id": image["id"], "category_id": each["category_id"], "bbox": each["bbox"], "score": each["score"]}
        for image in document["images"]
        for each in image["detections"]
    ]
    path = folder / "results.json"
    write_text_atomic(path, json.dumps(results))
    return path


def _yolo(document: Mapping, names: Sequence[Path], folder: Path) -> Path:
    labels = {each["id"]: label for label, each in enumerate(document["categories"])}
    for image, name in zip(document["images"], names, strict=True):
        rows = []
        for each in image["detections"]:
            x, y, width, height = each["bbox"]
            centre = ((x + width / 2) / image["width"], (y + height / 2) / image["height"])
            numbers = (*centre, width / image["width"], height / image["height"], each["score"])
            rows.append(f"{labels[each['category_id']]} " + " ".join(f"{number:.6f}" for number in numbers))
        path = folder / "labels" / name.with_suffix(".txt")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{row}\n" for row in rows))
    (folder / "labels").mkdir(exist_ok=True)
    (folder / "labels" / "classes.txt").write_text("".join(f"{each['name']}\n" for each in document["categories"]))
    return folder / "labels"


def _voc(document: Mapping, names: Sequence[Path], folder: Path) -> Path:
    """Pixels count from 1 in VOC."""
    for image, name in zip(document["images"], names, strict=True):
        root = ElementTree.Element("annotation")
        ElementTree.SubElement(root, "filename").text = Path(image["file_name"]).name
        size = ElementTree.SubElement(root, "size")
        for key, value in (("width", image["width"]), ("height", image["height"]), ("depth", 3)):
            ElementTree.SubElement(size, key).text = str(value)
        for each in image["detections"]:
            entry = ElementTree.SubElement(root, "object")
            ElementTree.SubElement(entry, "name").text = each["category"]
            ElementTree.SubElement(entry, "score").text = str(each["score"])
            box = ElementTree.SubElement(entry, "bndbox")
            x, y, width, height = each["bbox"]
            for key, value in (("xmin", x + 1), ("ymin", y + 1), ("xmax", x + width), ("ymax", y + height)):
                ElementTree.SubElement(box, key).text = f"{value:.2f}"
        path = folder / "annotations" / name.with_suffix(".xml")
        path.parent.mkdir(parents=True, exist_ok=True)
        ElementTree.indent(root)
        ElementTree.ElementTree(root).write(path, encoding="utf-8")
    (folder / "annotations").mkdir(exist_ok=True)
    return folder / "annotations"


def _graphs(document: Mapping, names: Sequence[Path], folder: Path, format: str) -> Path:
    for image, name in zip(document["images"], names, strict=True):
        path = folder / "graphs" / name.with_suffix(SUFFIXES[format])
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomic(path, graph_text(image, format))
    return folder / "graphs"


def _csv(document: Mapping, names: Sequence[Path], folder: Path) -> Path:
    path = folder / "predictions.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["file_name", "image_id", "category", "category_id", "score", "x", "y", "width", "height"])
        for image in document["images"]:
            for each in image["detections"]:
                row = (image["file_name"], image["id"], each["category"], each["category_id"], each["score"])
                writer.writerow([*row, *each["bbox"]])
    return path


def named_once(names: Mapping[Path, Path]) -> dict[Path, Path]:
    """A relative path for each file, below an output folder; files of one name get a number."""
    chosen: dict[Path, Path] = {}
    taken = set()
    for path, name in names.items():
        free, number = name, 1
        while free.with_suffix("") in taken:
            number += 1
            free = name.with_name(f"{name.stem}_{number}{name.suffix}")
        taken.add(free.with_suffix(""))
        chosen[path] = free
    return chosen


def categories_as_json(categories: Sequence[Category]) -> list[dict]:
    """Ids and names of the training data."""
    return [{"id": category.id, "name": category.name} for category in categories]
