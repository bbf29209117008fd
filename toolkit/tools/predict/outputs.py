"""Writes predictions in the formats that other programs read."""

import dataclasses
import json
import os
import shutil
from collections.abc import Mapping, Sequence, Set
from pathlib import Path

import numpy as np

from toolkit.base.errors import BadInput
from toolkit.base.files import distinct, without_suffix, write_text_atomic
from toolkit.base.masks import areas
from toolkit.data.table import LabelledImages
from toolkit.detectors.scene_graphs.formats import graph_text
from toolkit.tools.predict.choices import GRAPH_SUFFIXES
from toolkit.tools.writers import write_coco, write_csv, write_label_studio, write_voc, write_yolo

# The files and folders that `scripts/predict.py` writes.
OUTPUT_FILES = ("predictions.json", "predictions.jsonl", "results.json", "dataset.json", "predictions.csv")
OUTPUT_FILES += ("label_studio.json", "uncertain.csv", "labels", "annotations", "pictures", "videos", "graphs")
WITHOUT_MASKS = ("voc", "csv")  # formats that cannot hold masks


def write_outputs(
    document: Mapping,
    detections: LabelledImages,
    names: Sequence[str],
    formats: Sequence[str],
    folder: Path,
) -> list[str]:
    """Write predictions to a folder in the requested formats; return a sentence for each format that changes some.

    Args:
        document: the content of predictions.json, see scripts/predict.py.
        detections: the same predictions as `LabelledImages`.
        names: a relative path for each image, all different, by which the files of an image are named.
        formats: any of `OUTPUT_FORMATS`. json: predictions.json. jsonl: the same with one line for each image. coco:
            COCO's list of results, and `dataset.json`, see `write_data_set`. yolo: a text file for each image with
            class, centre and size as fractions of the image, and score. voc: an XML file for each image. csv: a row
            for each detection. label_studio: tasks with pre-annotations. dot (Graphviz) and networkx (its node-link
            JSON), for scene graphs: a file for each image in graphs/. Boxes in yolo, voc, csv and label_studio are
            clipped to their image. Masks are written by json, jsonl, coco and label_studio, and by yolo as a polygon
            in place of the box, but not by `WITHOUT_MASKS`.
    """
    changes = []
    folder.mkdir(parents=True, exist_ok=True)
    inside = clip_detections(detections)  # for formats of data sets, whose readers refuse boxes outside the image
    for name in formats:
        if name == "json":
            write_text_atomic(folder / "predictions.json", _as_text(document))
        elif name == "jsonl":
            write_text_atomic(
                folder / "predictions.jsonl",
                "".join(f"{json.dumps(e)}\n" for e in document["images"]),
            )
        elif name == "coco":
            write_coco(detections, folder / "results.json")
            write_data_set(detections, folder / "dataset.json")
        elif name == "yolo":
            without_polygon = write_yolo(inside, folder / "labels", names)
            if without_polygon:
                changes.append(f"yolo: of detections whose mask has no pixel, the boxes are written: {without_polygon}")
            (folder / "labels").mkdir(exist_ok=True)
            names_text = "".join(f"{' '.join(category.name.split())}\n" for category in detections.categories)
            (folder / "labels" / "classes.txt").write_text(names_text, encoding="utf-8")
        elif name == "voc":
            write_voc(inside, folder / "annotations", names)
        elif name == "csv":
            paths = [os.path.abspath(row.file_name) for row in inside.images]  # since the table is in another folder
            write_csv(inside.renamed(paths), folder / "predictions.csv")
        elif name == "label_studio":
            root = served_root(inside) if inside.images else folder
            write_label_studio(_named_below(inside, root), folder / "label_studio.json")
        else:
            for graph, image in zip(document["images"], names, strict=True):
                path = folder / "graphs" / f"{without_suffix(image)}{GRAPH_SUFFIXES[name]}"
                path.parent.mkdir(parents=True, exist_ok=True)
                write_text_atomic(path, graph_text(graph, name))
    return changes


def names_of_outputs(files: Mapping[Path, Path], fetched: Set[Path], formats: Sequence[str]) -> dict[Path, str]:
    """Choose a relative path for each image, by which the files of the image are named; all paths are different.

    Readers of YOLO and VOC look for an image at this path in `data.image_dir`. Therefore images from several folders
    get their path relative to the folder that contains all of them, not relative to the given folder of each.

    Args:
        files: the image files as `find_images` returns them.
        fetched: those of the files that were downloaded, which are deleted later; they keep their file names.
        formats: the requested formats, see `write_outputs`.

    Raises:
        BadInput: YOLO is requested, and two images would have the same label file.
    """
    here = {path: Path(os.path.abspath(path)) for path in files if path not in fetched}
    names = {path: name.as_posix() for path, name in files.items()}
    folders = {absolute.parents[len(files[path].parts) - 1] for path, absolute in here.items()}
    if len(folders) > 1:
        common = os.path.commonpath([absolute.parent for absolute in here.values()])
        names |= {path: absolute.relative_to(common).as_posix() for path, absolute in here.items()}
    if "yolo" in formats:
        _check_labels_differ(names)
    return dict(zip(names, distinct(names.values(), without_suffix), strict=True))


def _check_labels_differ(names: Mapping[Path, str]) -> None:
    """Raise BadInput naming all images that would share a file of YOLO labels with another one."""
    first_of: dict[str, Path] = {}
    faults = []
    for path, name in names.items():
        label_file = f"{without_suffix(name)}.txt"
        first = first_of.setdefault(label_file, path)
        if first != path:
            faults.append(
                f"{first} and {path} would share the file labels/{label_file}, since YOLO has no endings in its names: "
                "rename one of them, or choose --format coco, voc or csv, which hold both"
            )
    if faults:
        raise BadInput(faults)


def images_root(detections: LabelledImages) -> Path:
    """Return the deepest folder that contains all image files."""
    return Path(os.path.commonpath([Path(row.file_name).absolute().parent for row in detections.images]))


def served_root(detections: LabelledImages) -> Path:
    """Return the folder that Label Studio is to serve: the one around that of the images, which it does not accept."""
    return images_root(detections).parent


def _named_below(detections: LabelledImages, root: Path) -> LabelledImages:
    """Return a copy whose image files have names relative to a folder."""
    files = [Path(row.file_name).absolute() for row in detections.images]
    return detections.renamed([file.relative_to(root).as_posix() for file in files])


def write_data_set(detections: LabelledImages, path: Path) -> None:
    """Write detections, clipped to their images, as the annotation file of a COCO data set to train on.

    Each annotation has a `score`, and its mask if the detector predicts masks; names of image files are relative to
    `images_root`. Without images, nothing is written.
    """
    if not detections.images:
        return
    found = clip_detections(detections).boxes
    annotated = dataclasses.replace(
        found, scores=None, ids=np.arange(1, len(found) + 1), extra={**found.extra, "score": found.scores}
    )
    if "masks" in found.extra:
        of_pixels = areas(found.extra["masks"], (0, 0))  # run lengths have their own size
        annotated = dataclasses.replace(annotated, area=of_pixels)
    write_coco(dataclasses.replace(_named_below(detections, images_root(detections)), boxes=annotated), path)


def clip_detections(detections: LabelledImages) -> LabelledImages:
    """Return a copy with boxes clipped to their images; boxes without an area inside the image are dropped."""
    if not detections.images:
        return detections
    found = detections.boxes
    limits = np.array([(row.width, row.height) * 2 for row in detections.images])[found.image_index]
    inside = dataclasses.replace(found, xyxy=found.xyxy.clip(0, limits))
    has_area = (inside.xyxy[:, 2:] > inside.xyxy[:, :2]).all(axis=1)
    return dataclasses.replace(detections, boxes=inside[has_area])


def check_output_folder(folder: Path, inputs: Sequence[Path], overwrite: bool) -> None:
    """Check that a new prediction neither mixes with earlier results in a folder nor overwrites its own inputs.

    Raises:
        BadInput: the folder holds results and `overwrite` is False, or an input is one of these results.
    """
    old = outputs_in(folder)
    real = {Path(os.path.realpath(path)) for path in old}  # `resolve` raises for a link to itself
    lost = []
    for path in inputs:
        real_path = Path(os.path.realpath(path))
        if real & {real_path, *real_path.parents}:
            lost.append(path)
    if lost:
        raise BadInput([f"{path}: a new prediction would overwrite it; choose another --out" for path in lost])
    if old and not overwrite:
        raise BadInput(
            f"--out {folder} holds an earlier prediction ({', '.join(path.name for path in old)}): choose another "
            "folder, or replace it with --overwrite"
        )


def clear_outputs(folder: Path) -> None:
    """Delete the files and folders in `OUTPUT_FILES` that an earlier prediction has written to a folder."""
    for path in outputs_in(folder):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def outputs_in(folder: Path) -> list[Path]:
    """Return the files and folders in `OUTPUT_FILES` that a prediction has written to a folder."""
    return [folder / name for name in OUTPUT_FILES if (folder / name).exists()]


def _as_text(document: Mapping) -> str:
    """Return JSON with a line for each image."""
    lists = {key: ",\n  ".join(json.dumps(entry) for entry in document[key]) for key in ("images", "errors")}
    whole = {key: f"[\n  {text}]" for key, text in lists.items() if text}
    lines = [f"{json.dumps(key)}: {whole.get(key) or json.dumps(value)}" for key, value in document.items()]
    return "{" + ",\n".join(lines) + "}\n"
