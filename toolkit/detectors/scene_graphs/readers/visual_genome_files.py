"""The three files of a data set in the layout of Visual Genome, recognised by their content."""

import re
from pathlib import Path

import h5py

from toolkit.base.errors import BadInput

MAX_NAMES_FILE_BYTES = 64_000_000  # bytes; objects.json of Visual Genome beside it is much larger
PROBED_BYTES = 4096  # bytes of a list that show its content
NAME_LIST_KEYS = (rb'"label_to_idx"', rb'"predicate_to_idx"')
IMAGE_SIZE_KEYS = (rb'"image_id"\s*:', rb'"width"\s*:', rb'"height"\s*:')
REQUIRED_FILES = {
    "graphs": "HDF5 file with `boxes_1024` and `relationships`",
    "names": "JSON file with `label_to_idx` and `predicate_to_idx`",
    "images": "JSON list of images with `image_id`, `width` and `height`",
}


def find_files(place: Path) -> tuple[Path, Path, Path]:
    """Return the files of graphs (HDF5), names (JSON) and images (JSON) in the folder `place`. If `place` is an HDF5
    file, it is the file of graphs, and the others are searched in its folder.

    If several files have names, the one is chosen that names attributes if the graphs have them and does not otherwise,
    and then the one whose file name fits (`VG-SGG.h5`, `VG-SGG-dicts.json`). Raises BadInput if a file is missing or
    several fit.
    """
    folder = place if place.is_dir() else place.parent
    if not place.exists() or not folder.is_dir():
        raise BadInput(f"{place}: no such folder; expected {', '.join(REQUIRED_FILES.values())} in it (--data.name)")
    documents = sorted(folder.glob("*.json"))
    graphs = [place]
    if not place.is_file():
        graphs = _only_graphs(sorted([*folder.glob("*.h5"), *folder.glob("*.hdf5")]))
    names = [file for file in documents if _holds_names(file)]
    if len(graphs) == 1 and len(names) > 1:
        names = _of_graphs(names, graphs[0])
    found = {
        "graphs": graphs,
        "names": names,
        "images": [file for file in documents if _lists_images(file)],
    }
    faults = []
    for kind, files in found.items():
        if not files:
            faults.append(f"{folder}: no {REQUIRED_FILES[kind]}")
        elif len(files) > 1:
            remedy = "choose one: --data.name FILE" if kind == "graphs" else "leave one of them in the folder"
            listed = _joined_names(files)
            faults.append(f"{folder}: {len(files)} files are a {REQUIRED_FILES[kind]} ({listed}); {remedy}")
    if faults:
        raise BadInput(faults)
    return graphs[0], names[0], found["images"][0]


def _joined_names(files: list[Path]) -> str:
    return ", ".join(file.name for file in files)


def _only_graphs(files: list[Path]) -> list[Path]:
    """Return the files with graphs. A single file is returned whatever its content: reading it reports that."""
    if len(files) == 1:
        return files
    return [file for file in files if _has(file, "boxes_1024", "relationships")]


def _has(file: Path, *keys: str) -> bool:
    try:
        with h5py.File(file, "r") as h5:
            return all(key in h5 for key in keys)
    except OSError:
        return False


def _of_graphs(files: list[Path], graphs: Path) -> list[Path]:
    has_attributes = _has(graphs, "attributes")
    agreeing = []
    for file in files:
        names_attributes = b'"attribute_to_idx"' in file.read_bytes()
        if names_attributes == has_attributes:
            agreeing.append(file)
    agreeing = agreeing or files
    namesakes = [file for file in agreeing if file.stem.replace("-dicts", "") == graphs.stem]
    return namesakes or agreeing


def _holds_names(file: Path) -> bool:
    try:
        if file.stat().st_size > MAX_NAMES_FILE_BYTES or not _head(file).startswith(b"{"):
            return False
        content = file.read_bytes()
    except OSError:
        return False
    return all(name in content for name in NAME_LIST_KEYS)


def _lists_images(file: Path) -> bool:
    try:
        first = re.match(rb"\[\s*\{[^{}]*", _head(file))
    except OSError:
        return False
    return first is not None and all(re.search(key, first[0]) for key in IMAGE_SIZE_KEYS)


def _head(file: Path) -> bytes:
    with open(file, "rb") as opened:
        return opened.read(PROBED_BYTES).lstrip(b"\xef\xbb\xbf").lstrip()
