"""VRD (Lu et al., ECCV 2016): `annotations_{train,test}.json` with a list of relations for each image, whose boxes are
[ymin, ymax, xmin, xmax]. The names are in `objects.json` and `predicates.json`, or in `obj.txt` and `rel.txt`, one a
line."""

from pathlib import Path

from toolkit.base.errors import BadInput
from toolkit.base.files import read_json
from toolkit.data.annotations import Annotations
from toolkit.data.checks import unsafe_file_name
from toolkit.data.decoding import ImageError, probe_image
from toolkit.data.image_sources import ImageSources
from toolkit.detectors.scene_graphs.readers.graphs import add_graph, empty_graphs, noting_faults

NUM_VAL_IMAGES = 500
EXPECTED_ENTRY = "relations with predicate, subject and object, both with category and bbox [ymin, ymax, xmin, xmax]"


def files_of(folder: Path, split: str) -> list[Path]:
    """Return the files that the split train, val or test is read from, whether they exist or not."""
    annotations = "annotations_test.json" if split == "test" else "annotations_train.json"
    names = ("objects.json", "predicates.json")
    if not (folder / "objects.json").is_file() and (folder / "obj.txt").is_file():
        names = ("obj.txt", "rel.txt")
    return [folder / name for name in (annotations, *names)]


def annotations_of(files: list[Path], images: Path | ImageSources, split: str, num_val: int) -> Annotations:
    """Return images, boxes and relations of a split.

    An object that several relations name, by box and class, becomes one object. If a relation names the same object
    twice, as 109 of 37,993 do, two objects with the same box are made of it.

    test: the images of the test file; val: the first `num_val` images of the training file; train: its other images.
    The file does not give the sizes of the images, so they are read from the image files. Raises BadInput for entries
    that are not as expected.
    """
    annotated = read_json(files[0])
    classes, predicates = map(_read_names, files[1:])
    names = list(annotated)
    problems = []
    chosen = {"train": names[num_val:], "val": names[:num_val], "test": names}[split]
    annotations = empty_graphs(classes, predicates)
    for number, name in enumerate(chosen):
        objects: dict[tuple, int] = {}
        relations = []
        with noting_faults(problems, f"{files[0]}, image {name}", EXPECTED_ENTRY):
            for row in annotated[name]:
                subject = _object(row["subject"])
                other = _object(row["object"])
                if other == subject:
                    other += ("again",)
                first = objects.setdefault(subject, len(objects))
                second = objects.setdefault(other, len(objects))
                relations.append((first, second, row["predicate"]))
            boxes = [(label, [x1, y1, x2 - x1, y2 - y1]) for label, y1, y2, x1, x2, *_ in objects]
            height, width = _size_hw(images, name)
            image = {"id": number + 1, "file_name": name, "width": width, "height": height}
            add_graph(annotations, image, boxes, relations)
    if problems:
        raise BadInput(problems)
    return annotations


def _read_names(file: Path) -> list:
    if file.suffix == ".json":
        return read_json(file, list)
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
        return [line.strip() for line in lines if line.strip()]
    except (OSError, ValueError) as error:
        raise BadInput(f"{file}: cannot be read: {error}") from error


def _size_hw(images: Path | ImageSources, name: str) -> tuple[int, int]:
    """Return the size of an image, or 1, 1 if it cannot be opened: the check of the files reports the reason."""
    try:
        return (1, 1) if unsafe_file_name(name) else probe_image(images / name).size_hw
    except ImageError:
        return 1, 1


def _object(entry: dict) -> tuple:
    y1, y2, x1, x2 = entry["bbox"]
    return entry["category"], y1, y2, x1, x2
