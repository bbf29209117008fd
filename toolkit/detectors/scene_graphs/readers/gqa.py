"""GQA's scene graphs (Hudson and Manning, CVPR 2019): `train_sceneGraphs.json` and `val_sceneGraphs.json`, in which
objects are listed by id with name, box and relations. Names are not a closed set: the most frequent ones of the
training file are the classes and predicates."""

from collections import Counter
from pathlib import Path

from toolkit.base.errors import BadInput
from toolkit.base.files import read_json
from toolkit.data.annotations import Annotations
from toolkit.data.image_sources import ImageSources
from toolkit.detectors.scene_graphs.readers.graphs import add_graph, empty_graphs, noting_faults

NUM_VAL_IMAGES = 5000
EXPECTED_ENTRY = "width, height and objects, each with name, x, y, w, h and relations to an object, with a name"
NUM_CLASSES, NUM_PREDICATES = 200, 100  # GQA200 (Dong et al., CVPR 2022)


def files_of(folder: Path, split: str) -> list[Path]:
    """Return the files that the split train, val or test is read from, whether they exist or not."""
    files = [folder / "train_sceneGraphs.json"]  # which decides about the names
    if split == "test":
        files.append(folder / "val_sceneGraphs.json")
    return files


def annotations_of(files: list[Path], images: Path | ImageSources, split: str, num_val: int) -> Annotations:
    """Return images, boxes and relations of a split; classes and predicates are ordered by how often training has them.

    test: the images of the validation file; val: the first `num_val` images of the training file; train: its other
    images. Objects of other classes are left out, so are their relations and those of other predicates, and then images
    without a relation. Raises BadInput for entries that are not as expected.
    """
    training = read_json(files[0])
    problems = []
    classes, predicates = _vocabulary(training, files[0], problems)
    graphs = read_json(files[1]) if split == "test" else training
    names = list(graphs)
    chosen = {"train": names[num_val:], "val": names[:num_val], "test": names}[split]
    labels = {name: number for number, name in enumerate(classes)}
    kinds = {name: number for number, name in enumerate(predicates)}
    annotations = empty_graphs(classes, predicates)
    for name in chosen:
        with noting_faults(problems, f"{files[-1]}, image {name}", EXPECTED_ENTRY):
            graph = graphs[name]
            kept = {key: box for key, box in graph["objects"].items() if box["name"] in labels}
            number_of = {key: number for number, key in enumerate(kept)}
            relations = []
            for key, box in kept.items():
                for relation in box["relations"]:
                    if relation["object"] in number_of and relation["name"] in kinds:
                        other = number_of[relation["object"]]
                        relations.append((number_of[key], other, kinds[relation["name"]]))
            if relations:
                boxes = []
                for box in kept.values():
                    xywh = [box["x"], box["y"], box["w"], box["h"]]
                    boxes.append((labels[box["name"]], xywh))
                image = {
                    "id": name,
                    "file_name": f"{name}.jpg",
                    "width": graph["width"],
                    "height": graph["height"],
                }
                add_graph(annotations, image, boxes, relations)
    if problems:
        raise BadInput(dict.fromkeys(problems))
    return annotations


def _vocabulary(training: dict, file: Path, problems: list[str]) -> tuple[list[str], list[str]]:
    """Return the 200 most frequent names of objects and 100 of relations; equal ones alphabetically."""
    objects: Counter = Counter()
    relations: Counter = Counter()
    for name, graph in training.items():
        with noting_faults(problems, f"{file}, image {name}", EXPECTED_ENTRY):
            for box in graph["objects"].values():
                objects[box["name"]] += 1
                relations.update(relation["name"] for relation in box["relations"])
    return _most_frequent(objects, NUM_CLASSES), _most_frequent(relations, NUM_PREDICATES)


def _most_frequent(names: Counter, count: int) -> list[str]:
    ranked = sorted(names.items(), key=lambda item: (-item[1], str(item[0])))
    return [name for name, _ in ranked[:count]]
