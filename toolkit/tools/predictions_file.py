"""Reads predictions files, which `toolkit.evaluation.predictions` or another program has written.

A COCO results file of another program has no file of metadata. If it names image files (as `file_name` of a detection,
as `file_name` in `images` of a whole COCO document, or as `image_id`), images are matched by these names, with or
without folder and ending.
"""

import json
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

import numpy as np

from toolkit.base.boxes import Boxes
from toolkit.base.errors import BadInput
from toolkit.base.masks import column_of, rle
from toolkit.data.segmentations import near_picture, outline_fault, shape_of, with_box_of_mask
from toolkit.evaluation.predictions import about_file, images_fingerprint

LISTED_FAULTS = 10
MAX_NUMBER = 1e9  # of a score or of pixels; beyond it, areas and float32 overflow
# Types of the entries of `FILE.about.json`, and of the entries of two of them, in words and as types. `classes` has a
# check of its own, see `_classes_of`.
_OBJECT = ("an object", dict)
_TEXT = ("a text", str)
_TEXT_OR_NULL = ("a text or null", str | None)
_ABOUT = {
    "made_on": _OBJECT,
    "data": _OBJECT,
    "scores": _OBJECT,
    "detector": _TEXT,
    "mode": _TEXT_OR_NULL,
    "protocol": _TEXT_OR_NULL,
    "precision": _TEXT_OR_NULL,
    "settings_without_seed": _TEXT_OR_NULL,
}
_MADE_ON = {"name": _TEXT, "fingerprint": _TEXT, "images_fingerprint": _TEXT}
_DATA = {"source": ("a text, a number or a list", str | int | float | list)}
# The arrays of `FILE.graphs.npz` by name: the sizes of a row; None: any.
_INDICES = {
    **dict.fromkeys(("labels", "predicates", "true_labels"), ()),
    **dict.fromkeys(("pairs", "combinations"), (2,)),
    "two_predicates": (None,),
    "true_relations": (3,),
}
_NUMBERS = {
    **dict.fromkeys(("scores", "triplet_scores"), ()),
    **dict.fromkeys(("predicate_scores", "two_scores"), (None,)),
    "boxes": (4,),
}
_GRAPH_COLUMNS = _INDICES | _NUMBERS
_OF_OBJECTS = ("boxes", "labels", "scores", "true_labels")
_OF_PAIRS = ("pairs", "predicate_scores", "predicates", "triplet_scores", "two_predicates", "two_scores")


@dataclass
class PredictionsFile:
    """The content of a predictions file, with the labels and the image order of a data table.

    Attributes:
        predictions: `Boxes` in the image order of the table. For scene graphs, a dict of arrays for each image id:
            `boxes`, `scores`, `labels`, `pairs`, the scores of the predicates as `compact_graph` returns them (or
            `predicate_scores`), and the given graph if boxes were given.
        about: the metadata that `write_predictions` was given; empty for the file of another program.
        corrected: whether the annotations, but not the images, have changed since the predictions were made.
        changed_classes: one sentence for each class that was renamed, added or removed in the changed annotations.
    """

    predictions: Boxes | dict
    about: dict
    corrected: bool = False
    changed_classes: tuple[str, ...] = ()


def read_predictions(path: str | Path, table) -> PredictionsFile:
    """Read a predictions file, or a COCO results file of another program, as predictions on the data table `table`.

    An image that a file of another program does not mention has no detections. If the annotations have changed since
    this toolkit wrote the file, classes are matched by name, see `labels_by_name`.

    Raises:
        BadInput: the file is missing or not a list of COCO results, it was made on other data, or it has ids or file
            names that the table does not have.
    """
    path = Path(path).expanduser()
    about = read_about(path)
    entries = _entries(path)
    made_on = about.get("made_on", {})
    graphs_file = path.with_suffix(".graphs.npz")
    fingerprint = made_on.get("fingerprint")
    corrected = fingerprint is not None and fingerprint != table.fingerprint
    classes = [(str(category.id), category.name) for category in table.categories]
    changed_classes: tuple[str, ...] = ()
    label_of = {category.id: label for label, category in enumerate(table.categories)}
    if corrected:
        classes_then = _classes_of(path, about, classes)
        if made_on.get("images_fingerprint") != images_fingerprint(table, classes_then):
            raise BadInput(
                f"{path} was made on other images ({made_on.get('name')}) than {table.name}; give the annotations of "
                "the images it was made on (--split FILE), or predict again"
            )
        if graphs_file.exists():  # they may depend on the boxes that were annotated then
            raise BadInput(
                f"{path} has scene graphs, made with other annotations than {table.name}; give those it was made on "
                "(--split FILE), or predict again"
            )
        if classes_then != classes:
            labels, changed_classes = labels_by_name(path, classes_then, table)
            label_of = {category["id"]: label for category, label in zip(about["classes"], labels, strict=True)}
    predictions = _boxes(path, entries, table, label_of)
    if graphs_file.exists():  # instead of COCO's list, which has another order and lacks boxes without a class
        predictions = _read_graphs(graphs_file, table.image_ids().tolist())
    return PredictionsFile(predictions, about, corrected, changed_classes)


def labels_by_name(path: Path, classes: Sequence[tuple[str, str]], table) -> tuple[list[int], tuple[str, ...]]:
    """Map the classes that predictions were made with to labels in annotations that have changed since.

    Classes are matched by id and name, then by name, and then by id, which means that the class was renamed.

    Args:
        path: the predictions file, for messages.
        classes: (id, name) of each class that the predictions were made with.
        table: the data table with the changed annotations.

    Returns:
        the label of each class, -1 if the class was removed, and one sentence for each class that was renamed, added
        (and has boxes) or removed.

    Raises:
        BadInput: some classes were removed and others with boxes were added, so they may be the same classes.
    """
    now = [(str(category.id), category.name) for category in table.categories]
    free = dict.fromkeys(range(len(now)))  # labels that no class has yet
    labels = [-1] * len(classes)
    sentences = []

    def give(same) -> list[tuple[int, int]]:
        """Pair each class that has no label with the first free one that is the same to it."""
        pairs = []
        for k, then in enumerate(classes):
            fitting = [label for label in free if same(then, now[label])]
            if labels[k] < 0 and fitting:
                labels[k] = fitting[0]
                free.pop(fitting[0])
                pairs.append((k, fitting[0]))
        return pairs

    give(lambda then, one: then == one)  # several classes may have one name
    give(lambda then, one: then[1] == one[1])
    renamed = give(lambda then, one: then[0] == one[0])
    sentences += [f"the class {classes[k][1]!r} is called {now[label][1]!r} now" for k, label in renamed]
    gone = [classes[k] for k in range(len(classes)) if labels[k] < 0]
    boxes = np.bincount(table.boxes().labels, minlength=len(now))
    added = [label for label in free if boxes[label]]
    if gone and added:
        raise BadInput(
            f"{path} has predictions of {[name for _, name in gone[:5]]}, which {table.name} does not know, and "
            f"{table.name} has boxes of {[now[label][1] for label in added[:5]]}, of which there are no predictions: "
            "if these are the same classes, give them the same name or the same id; else predict again"
        )
    sentences += [f"the predictions of the class {name!r}, which is gone, are left out" for _, name in gone]
    sentences += [f"the class {now[n][1]!r} is new: its {boxes[n]} boxes can only count as missed" for n in added]
    return labels, tuple(sentences)


def _classes_of(path: Path, about: Mapping, classes: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return (id, name) of the classes that predictions were made with; `classes` if the file does not list them."""
    listed = about.get("classes", [])
    if not isinstance(listed, list) or not all(map(_is_class, listed)):
        raise BadInput(f"{about_file(path)}: expected `classes`, a list of objects with id and name; predict again")
    return [(str(one["id"]), one["name"]) for one in listed] or classes


def _is_class(entry: object) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("id"), int | str) and isinstance(entry.get("name"), str)


def read_about(path: str | Path) -> dict:
    """Return the metadata of the predictions file `path`, from `FILE.about.json` in the same folder; {} if that does
    not exist.

    Raises BadInput if it cannot be read, or does not hold what `write_predictions` writes.
    """
    file = about_file(Path(path).expanduser())
    try:
        about = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise BadInput(f"{file}: cannot be read ({error}); remove it to read {path} without it") from error
    faults = _faults_of_about(about)
    if faults:
        raise BadInput(f"{file}: {fault}; remove that file to read {path} without it" for fault in faults)
    return about


def _faults_of_about(about: object) -> list[str]:
    """Return a phrase for each entry of the metadata that is not what `write_predictions` writes."""
    if not isinstance(about, dict):
        return [_other("the content", about, "an object")]
    faults = _other_types(about, _ABOUT)
    made_on = about.get("made_on")
    if isinstance(made_on, dict):
        faults += _other_types(made_on, _MADE_ON, "made_on.")
    data = about.get("data")
    if isinstance(data, dict):
        faults += _other_types({"source": None, **data}, _DATA, "data.")  # the source must be there
    return faults


def _other_types(entries: Mapping, types: Mapping, prefix: str = "") -> list[str]:
    faults = []
    for key, (words, expected) in types.items():
        if key in entries and not isinstance(entries[key], expected):
            faults.append(_other(prefix + key, entries[key], words))
    return faults


def _other(name: str, value: object, words: str) -> str:
    return f"{name} is {str(value)[:60]!r}, expected {words}"


def _entries(path: Path) -> list[dict]:
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BadInput(f"{path}: not a COCO results file ({error}); expected a JSON list of detections") from error
    named = {}
    if isinstance(entries, dict) and isinstance(entries.get("annotations"), list):  # some write a whole COCO document
        images = entries.get("images", [])
        if not isinstance(images, list):
            raise BadInput(f"{path}: `images` is {str(images)[:60]}; expected a list of objects with id and file_name")
        images = [image for image in images if isinstance(image, dict) and "file_name" in image]
        named = {str(image.get("id")): image["file_name"] for image in images}
        entries = entries["annotations"]
    if not isinstance(entries, list):
        kind = type(entries).__name__
        raise BadInput(f"{path}: not a COCO results file: a JSON {kind}; expected a list of detections")
    entries = list(map(with_box_of_mask, entries))  # COCO's results of segmentation have no `bbox`
    for number, entry in enumerate(entries):
        if not _is_detection(entry):
            expected = "expected image_id, category_id, score, and bbox [x, y, width, height] or segmentation"
            raise BadInput(f"{path}, detection {number}: {_described(entry)}; {expected}")
        if str(entry["image_id"]) in named:
            entry.setdefault("file_name", named[str(entry["image_id"])])
    return entries


def _described(entry: object) -> str:
    """Return an entry as text, with dots in place of its mask, and what is wrong with this."""
    if not isinstance(entry, dict) or "segmentation" not in entry:
        return str(entry)[:120]
    text = str({**entry, "segmentation": "..."})[:120]
    _, faults = shape_of(entry["segmentation"])
    return f"{text}, whose mask cannot be used: {'; '.join(faults)}" if faults else text


def _is_detection(entry: object) -> bool:
    if not isinstance(entry, dict) or not {"image_id", "category_id", "bbox", "score"} <= entry.keys():
        return False
    ids = (entry["image_id"], entry["category_id"])
    bbox = entry["bbox"]
    return isinstance(bbox, list) and len(bbox) == 4 and all(isinstance(number, int | float | str) for number in ids)


def _name_by_file(entries: list[dict], table) -> None:
    """Set the table's image ids in detections by the names of their files; change nothing if some do not fit."""
    ids = table.image_ids().tolist()
    of_name: dict[str, list] = {}
    for image_id, name in zip(ids, table.file_names(), strict=True):
        path = PurePosixPath(name)
        for key in {name, path.name, path.stem}:
            of_name.setdefault(key, []).append(image_id)
    image_ids = []
    for entry in entries:
        path = PurePosixPath(str(entry.get("file_name", entry["image_id"])).replace("\\", "/"))
        fitting = next(
            (of_name[key] for key in (str(path), path.name, path.stem) if key in of_name),
            [],
        )
        if len(fitting) != 1:
            return
        image_ids.append(fitting[0])
    for entry, image_id in zip(entries, image_ids, strict=True):
        entry["image_id"] = image_id


def _boxes(path: Path, entries: list[dict], table, label_of: Mapping) -> Boxes:
    """Convert detections to columns in the order of the table.

    label_of: the label of each category id; -1: of a class that is left out.
    """
    image_ids = table.image_ids().tolist()
    position = {image_id: i for i, image_id in enumerate(image_ids)}
    if any("file_name" in entry or entry["image_id"] not in position for entry in entries):
        _name_by_file(entries, table)
    problems = []
    for what, index_of, key in (("image ids", position, "image_id"), ("category ids", label_of, "category_id")):
        unknown = list(dict.fromkeys(entry[key] for entry in entries if entry[key] not in index_of))
        if unknown:
            files = ", and no names of its files say which images are meant" if key == "image_id" else ""
            problems.append(
                f"{path}: {what} {unknown[:5]} are not in {table.name}, whose {what} are {list(index_of)[:5]}{files}; "
                "give the data the file was made on (--split FILE)"
            )
    if problems:
        raise BadInput(problems)
    _check_numbers(path, entries)
    boxes = np.array([entry["bbox"] for entry in entries], dtype=np.float64).reshape(-1, 4)
    scores = np.array([entry["score"] for entry in entries], dtype=np.float64)
    boxes[:, 2:] += boxes[:, :2]
    index = np.array([position[entry["image_id"]] for entry in entries], dtype=np.int64)
    labels = np.array([label_of[entry["category_id"]] for entry in entries], dtype=np.int64)
    kept = labels >= 0
    boxes = boxes[kept]
    scores = scores[kept]
    labels = labels[kept]
    index = index[kept]
    order = np.argsort(index, kind="stable")
    counts = np.bincount(index, minlength=len(image_ids))
    found = Boxes.found(counts, boxes[order], scores[order], labels[order])
    masks = _masks(path, entries, table.sizes_hw()[[position[entry["image_id"]] for entry in entries]])
    if masks is None:
        return found
    return replace(found, extra={"masks": masks[kept][order]})


def _check_numbers(path: Path, entries: list[dict]) -> None:
    """Raise BadInput for scores that are not finite numbers, and for boxes that are not of numbers of pixels.

    Python's JSON reads NaN, Infinity and whole numbers of any length, and NumPy makes null a NaN.
    """
    faults = []
    for number, entry in enumerate(entries):
        score = entry["score"]
        if not _is_usable(score):
            faults.append(f"{path}, detection {number}: the score is {str(score)[:60]}; expected a finite number")
        bbox = entry["bbox"]
        if not all(map(_is_usable, bbox)):
            expected = "four finite numbers of pixels"
            faults.append(f"{path}, detection {number}: the bbox is {str(bbox)[:120]}; expected {expected}")
        if len(faults) >= LISTED_FAULTS:
            break
    if faults:
        raise BadInput(faults)


def _is_usable(value: object) -> bool:
    return type(value) in (int, float) and abs(value) <= MAX_NUMBER  # not a bool, and not a NaN


def _masks(path: Path, entries: list[dict], sizes_hw: np.ndarray) -> np.ndarray | None:
    """Return the masks of detections as run lengths, (N,) `Rle`; None if no detection has one.

    sizes_hw: (N, 2) size of the image of each detection.

    Raises:
        BadInput: some detections have no mask, or one that cannot be read; the message lists the first of them.
    """
    if not any("segmentation" in entry for entry in entries):
        return None
    masks = []
    faults = []
    for number, (entry, size_hw) in enumerate(zip(entries, sizes_hw.tolist(), strict=True)):
        shape, reasons = shape_of(entry.get("segmentation"))
        if shape is not None:
            shape = near_picture(shape, tuple(size_hw))
            reasons = reasons or list(filter(None, [outline_fault(shape)]))
        if "segmentation" not in entry:
            reasons = ["has no segmentation, but other detections of the file have one"]
        if reasons:
            faults.append(f"{path}, detection {number}: {'; '.join(reasons)}")
        else:
            masks.append(rle(shape, tuple(size_hw)))
    if faults:
        raise BadInput(faults[:LISTED_FAULTS])
    return column_of(masks)


def _read_graphs(file: Path, image_ids: Sequence) -> dict:
    """Read graphs by image id, with their boxes. Raises BadInput if the file does not hold them."""
    arrays = _graph_arrays(file)
    names = [name for name in arrays if not name.endswith("/rows")]
    if any(len(arrays[f"{name}/rows"]) != len(image_ids) for name in names):
        raise BadInput(f"{file}: not of the same images as its predictions; predict again")
    columns = (np.split(arrays[name], np.cumsum(arrays[f"{name}/rows"])[:-1]) for name in names)
    graphs = {i: dict(zip(names, parts, strict=True)) for i, *parts in zip(image_ids, *columns, strict=True)}
    for image_id, graph in graphs.items():
        if not _fits_together(graph):
            raise BadInput(f"{file}: the graph of image {image_id} has pairs of boxes that it lacks; predict again")
    return graphs


def _graph_arrays(file: Path) -> dict[str, np.ndarray]:
    """Read the arrays of a file of graphs: each of `_GRAPH_COLUMNS` with the rows of every image as `NAME/rows`."""
    try:
        with zipfile.ZipFile(file), np.load(file, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
    except (ValueError, OSError, EOFError, LookupError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        reason = str(error).partition("\n")[0][:120]
        raise BadInput(f"{file}: not a file of scene graphs ({reason}); remove it to read only the boxes") from error
    faults = []
    for name in _GRAPH_COLUMNS:
        if name in arrays and not _is_column(name, arrays[name], arrays.get(f"{name}/rows")):
            faults.append(f"{file}: `{name}` with `{name}/rows` is not a column of scene graphs; predict again")
    unknown = arrays.keys() - _GRAPH_COLUMNS.keys() - {f"{name}/rows" for name in _GRAPH_COLUMNS}
    of_predicates = {"predicates", "combinations"} if "combinations" in arrays else {"predicate_scores"}
    missing = {"boxes", "labels", "scores", "pairs", *of_predicates} - arrays.keys()
    if unknown or missing:
        faults.append(f"{file}: it lacks {sorted(missing)} and has {sorted(unknown)[:5]}; predict again")
    if faults:
        raise BadInput(faults)
    return {name: array for name, array in arrays.items() if name.removesuffix("/rows") in arrays}


def _is_column(name: str, column: np.ndarray, rows: np.ndarray | None) -> bool:
    """Return whether an array has the numbers of this column of graphs, in as many rows as `rows` (I,) counts."""
    sizes = _GRAPH_COLUMNS[name]
    kinds = "iu" if name in _INDICES else "if"
    if rows is None or rows.ndim != 1 or rows.dtype.kind not in "iu" or (rows < 0).any():
        return False
    if column.dtype.kind not in kinds or column.ndim != 1 + len(sizes):
        return False
    fits = all(size is None or size == actual for size, actual in zip(sizes, column.shape[1:], strict=True))
    return fits and len(column) == rows.sum() and bool((np.abs(column) <= MAX_NUMBER).all())


def _fits_together(graph: Mapping[str, np.ndarray]) -> bool:
    """Return whether the columns of a graph are of the same boxes and pairs, and refer only to these."""
    boxes = len(graph["boxes"])
    pairs = len(graph["pairs"])
    of_objects = all(len(graph[name]) == boxes for name in _OF_OBJECTS if name in graph)
    of_pairs = all(len(graph[name]) == pairs for name in _OF_PAIRS if name in graph)
    relations = graph.get("true_relations", np.zeros((0, 3), np.int64))
    combinations = graph.get("combinations", np.zeros((0, 2), np.int64))
    places = ((graph["pairs"], boxes), (relations[:, :2], boxes), (combinations[:, :1], pairs))
    inside = all(((place >= 0) & (place < count)).all() for place, count in places)
    return of_objects and of_pairs and inside
