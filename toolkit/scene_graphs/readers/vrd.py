"""VRD (Lu et al., ECCV 2016): `annotations_{train,test}.json` with a list of relations for each image, whose boxes are
[ymin, ymax, xmin, xmax]; `objects.json` and `predicates.json` with the names."""

from pathlib import Path

from toolkit.data.annotations import Annotations
from toolkit.data.decoding import ImageError, probe_image
from toolkit.data.image_sources import ImageSources
from toolkit.errors import BadInput
from toolkit.scene_graphs.readers.graphs import add_graph, empty_graphs, read_json

NUM_VAL_IMAGES = 500


def files_of(folder: Path, split: str) -> list[Path]:
    annotations = f"annotations_{'test' if split == 'test' else 'train'}.json"
    return [folder / name for name in (annotations, "objects.json", "predicates.json")]


def annotations_of(files: list[Path], images: Path | ImageSources, split: str, num_val: int) -> Annotations:
    """Images, boxes and relations. An object that several relations name, by box and class, is one.

    test: the images of the test file; val: the first `num_val` of the training file; train: its others. The file does
    not say how large the images are: they are looked at.
    """
    annotations, classes, predicates = (read_json(file, kind) for file, kind in zip(files, (dict, list, list),
                                                                                    strict=True))  # fmt: skip
    names = list(annotations)
    chosen = {"train": names[num_val:], "val": names[:num_val], "test": names}[split]
    graphs = empty_graphs(classes, predicates)
    for number, name in enumerate(chosen):
        objects: dict[tuple, int] = {}
        relations = []
        for row in annotations[name]:
            try:
                ends = [_object(row[end]) for end in ("subject", "object")]
                relations.append((*(objects.setdefault(end, len(objects)) for end in ends), row["predicate"]))
            except (KeyError, TypeError, ValueError) as error:
                raise BadInput(
                    f"{files[0]}, image {name}: relation {row}; expected predicate, subject and object, each with "
                    f"category and bbox [ymin, ymax, xmin, xmax] ({error!r})"
                ) from error
        try:
            height, width = probe_image(images / name).size_hw
        except ImageError:  # checking the files says why
            height, width = 1, 1
        boxes = [(label, (x1, y1, x2 - x1, y2 - y1)) for label, y1, y2, x1, x2 in objects]
        image = {"id": number + 1, "file_name": name, "width": width, "height": height}
        add_graph(graphs, image, boxes, relations)
    return graphs


def _object(entry: dict) -> tuple:
    y1, y2, x1, x2 = entry["bbox"]
    return entry["category"], y1, y2, x1, x2
