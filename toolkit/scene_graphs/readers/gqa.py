"""GQA's scene graphs (Hudson and Manning, CVPR 2019): `train_sceneGraphs.json` and `val_sceneGraphs.json`, objects by
id with name, box and relations. Names are not a closed set: the most frequent of the training file are the classes."""

from collections import Counter
from pathlib import Path

from toolkit.data.annotations import Annotations
from toolkit.data.image_sources import ImageSources
from toolkit.scene_graphs.readers.graphs import add_graph, empty_graphs, read_json

NUM_VAL_IMAGES = 5000
CLASSES, PREDICATES = 200, 100  # GQA200 (Dong et al., CVPR 2022)


def files_of(folder: Path, split: str) -> list[Path]:
    return [folder / "train_sceneGraphs.json", *([folder / "val_sceneGraphs.json"] if split == "test" else [])]


def annotations_of(files: list[Path], images: Path | ImageSources, split: str, num_val: int) -> Annotations:
    """Images, boxes and relations; classes and predicates in the order of how often training has them.

    test: the images of the validation file; val: the first `num_val` of the training file; train: its others. Other
    objects, their relations, and images that are then left without a relation are left out.
    """
    training = read_json(files[0], dict)
    classes, predicates = vocabulary(training)
    graphs = read_json(files[1], dict) if split == "test" else training
    names = list(graphs)
    chosen = {"train": names[num_val:], "val": names[:num_val], "test": names}[split]
    labels, kinds = ({name: number for number, name in enumerate(names)} for names in (classes, predicates))
    annotations = empty_graphs(classes, predicates)
    for name in chosen:
        graph = graphs[name]
        kept = {key: entry for key, entry in graph["objects"].items() if entry["name"] in labels}
        position = {key: number for number, key in enumerate(kept)}
        relations = [
            (position[key], position[relation["object"]], kinds[relation["name"]])
            for key, entry in kept.items()
            for relation in entry["relations"]
            if relation["object"] in position and relation["name"] in kinds
        ]
        if relations:
            boxes = [(labels[entry["name"]], tuple(entry[side] for side in "xywh")) for entry in kept.values()]
            image = {"id": name, "file_name": f"{name}.jpg", "width": graph["width"], "height": graph["height"]}
            add_graph(annotations, image, boxes, relations)
    return annotations


def vocabulary(training: dict) -> tuple[list[str], list[str]]:
    """The 200 most frequent names of objects and 100 of relations; equal ones by the alphabet."""
    objects: Counter = Counter()
    relations: Counter = Counter()
    for graph in training.values():
        for entry in graph["objects"].values():
            objects[entry["name"]] += 1
            relations.update(relation["name"] for relation in entry["relations"])
    most = ((objects, CLASSES), (relations, PREDICATES))
    classes, predicates = (sorted(counts, key=lambda name: (-counts[name], name))[:limit] for counts, limit in most)
    return classes, predicates
