"""Data sets of the `datasets` library, from the hub or a local folder, with the usual `objects` column."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import datasets
from datasets.exceptions import DatasetsError

from toolkit.data.annotations import Annotations
from toolkit.data.check_files import FULL_CHECK_LIMIT, check_image, parallel
from toolkit.data.checks import check
from toolkit.data.decoding import ImageError, probe_image, read_file
from toolkit.data.formats.annotated import UNKNOWN_SIZE
from toolkit.data.table import DetectionTable, Problem
from toolkit.data.table_cache import cached_table, write_table
from toolkit.errors import BadInput
from toolkit.files import MAX_IMAGE_PIXELS

CATEGORY_KEYS = ("category", "categories", "category_id", "label", "labels")
ID_KEYS = ("id", "bbox_id", "ids")


@dataclasses.dataclass(frozen=True)
class Columns:
    """Where a data set keeps what we need: names of columns, and of keys in `objects` (None: it has none)."""

    image: str
    category: str
    id: str | None
    class_names: tuple[str, ...] | None  # None: labels are not a ClassLabel


def read_hub(
    name: str,
    split: str,
    *,
    on_error: str = "raise",
    cache_dir: str | Path | None = None,
    check_images: bool | str = True,
    max_image_pixels: int = MAX_IMAGE_PIXELS,
) -> DetectionTable:
    """Reads a split of a hub data set, of a `save_to_disk` folder, or of a folder of Parquet files.

    Expected: an image column and `objects {bbox (COCO xywh), category, [id], [area], [iscrowd]}`; `image_id`, `width`
    and `height` are used when there. Class names come from the ClassLabel feature. The encoded images are copied into
    the cached table. Validation and `on_error` as in `read_coco`. Raises BadInput, without network too.
    """
    split_rows = _load(name, split)
    columns = columns_of(split_rows.features, name)
    split_rows = split_rows.cast_column(columns.image, datasets.Image(decode=False))
    source = f"{name} ({split})"
    states = [os.stat(file["filename"]) for file in split_rows.cache_files]
    states = [(state.st_size, state.st_mtime_ns) for state in states]
    return cached_table(
        ["hub", source, check_images, split_rows._fingerprint, split_rows.cache_files, states],
        lambda cache_file: _read(split_rows, columns, source, (check_images, max_image_pixels), cache_file),
        name=source, cache_dir=cache_dir, on_error=on_error, max_image_pixels=max_image_pixels,
        empty="the split has no images",
    )  # fmt: skip


def _load(name: str, split: str) -> datasets.Dataset:
    folder = Path(name).expanduser()
    try:
        if (folder / "dataset_dict.json").exists() or (folder / "state.json").exists():
            loaded = datasets.load_from_disk(str(folder))
        else:
            return datasets.load_dataset(str(folder) if folder.is_dir() else name, split=split)
    except ConnectionError as error:
        raise unreachable(name, error) from error
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        raise BadInput(f"{name}: split {split!r} cannot be loaded: {str(error).splitlines()[0]}") from error
    if isinstance(loaded, datasets.DatasetDict):
        if split not in loaded:
            raise BadInput(f"{name}: no split {split!r}; choose from {', '.join(loaded)}")
        return loaded[split]
    if loaded.split is not None and str(loaded.split) != split:
        # one folder given for training and validation would otherwise pass unseen
        raise BadInput(f"{name}: the folder holds split {str(loaded.split)!r}, not {split!r}")
    return loaded


def unreachable(name: str, error: Exception) -> BadInput:
    """What is said where a data set is neither on this machine nor to be had."""
    return BadInput(f"{name}: the hub cannot be reached, and there is no copy on this machine; give a local folder "
                    "(save_to_disk or Parquet) as --data.name, or load it once with network and set "
                    f"HF_HUB_OFFLINE=1 ({error})")  # fmt: skip


def columns_of(features: datasets.Features, name: str) -> Columns:
    """Where a data set of these features keeps what we need. Raises BadInput for one without images or objects."""
    found = f"the columns are {', '.join(features)}"
    images = [key for key, feature in features.items() if isinstance(feature, datasets.Image)]
    if not images:
        raise BadInput(f"{name}: no image column; {found}")
    if "objects" not in features:
        raise BadInput(f"{name}: no `objects` column; {found}")
    objects = features["objects"]
    feature = getattr(objects, "feature", objects)  # List({...}) or {...: List(...)}
    feature = feature[0] if isinstance(feature, list) else feature
    keys = list(feature) if isinstance(feature, Mapping) else []
    category = next((key for key in CATEGORY_KEYS if key in keys), None)
    if category is None or "bbox" not in keys:
        raise BadInput(f"{name}: `objects` has the keys {', '.join(keys) or 'none'}; expected `bbox` and `category`")
    label = feature[category]
    label = getattr(label, "feature", label)
    names = tuple(label.names) if isinstance(label, datasets.ClassLabel) else None
    image = "image" if "image" in images else images[0]
    return Columns(image, category, next((key for key in ID_KEYS if key in keys), None), names)


def _read(
    rows: datasets.Dataset, columns: Columns, source: str, checking: tuple[bool | str, int], cache_file: Path
) -> DetectionTable:
    check_images, max_pixels = checking
    annotations, problems = _annotations(rows, columns, source)
    full = check_images == "full" or (check_images is True and len(rows) <= FULL_CHECK_LIMIT)

    def look(index: int) -> list[Problem]:
        image = annotations.images[index]
        try:
            data = _encoded(rows[index][columns.image], max_pixels)
            height, width = probe_image(data, max_pixels).size_hw
        except ImageError as error:
            # reported once, as the file's fault: neither the missing size nor a box outside it is another
            height = width = UNKNOWN_SIZE
            fault = [Problem("error", image.file_name, image.image_id, None, error.reason)]
        else:
            fault = []
        image = image._replace(width=image.width or width, height=image.height or height)
        annotations.images[index] = image
        return fault or (check_image(image, data, full, max_pixels) if check_images else [])

    problems += parallel(look, range(len(rows)), "checking images")
    places = {image.image_id: index for index, image in enumerate(annotations.images)}
    checked = check(annotations, source)
    good = checked.without({problem.image_id for problem in problems if problem.severity == "error"})
    return write_table(
        good.images, good.boxes, cache_file=cache_file, categories=good.categories,
        encoded=(_encoded(rows[places[row.image_id]][columns.image], max_pixels) for row in good.images),
        problems=problems + checked.problems, name=source,
    )  # fmt: skip


def _annotations(rows: datasets.Dataset, columns: Columns, source: str) -> tuple[Annotations, list[Problem]]:
    """The split in columns. Sizes that it lacks are None."""
    found = Annotations()
    for index, row in enumerate(rows.remove_columns(columns.image)):  # no image bytes in this pass
        add_row(found, row, f"row {index}", columns)
    if columns.class_names is not None:
        found.categories = numbered(columns.class_names)
        return found, []
    values = [value for value in found.category_ids.values if value is not None]
    found.categories = [{"id": value, "name": str(value)} for value in values]
    note = Problem("warning", source, None, None, "the labels are no ClassLabel; classes are called by their values")
    return found, [note]


def numbered(names: Sequence[str]) -> list[dict]:
    """Classes from 0 as categories of COCO."""
    return [{"id": label, "name": name} for label, name in enumerate(names)]


def add_row(found: Annotations, row: Mapping, file_name: str, columns: Columns) -> None:
    """A row of a data set, whose `objects` are a dict of lists or a list of dicts."""
    image_id = len(found.images) if row.get("image_id") is None else row["image_id"]
    found.add_image({"id": image_id, "file_name": file_name, "width": row.get("width"), "height": row.get("height")})
    objects = row["objects"] or []
    if isinstance(objects, Mapping):
        objects = [dict(zip(objects, values, strict=True)) for values in zip(*objects.values(), strict=True)]
    keys = {"bbox": "bbox", "area": "area", "iscrowd": "iscrowd", columns.id: "id", columns.category: "category_id"}
    for item in objects:
        known = {keys[key]: value for key, value in item.items() if key in keys and value is not None}
        found.add({"id": len(found) + 1, "image_id": image_id} | known)


def _encoded(image: Mapping | None, max_pixels: int) -> bytes:
    """The encoded bytes of an undecoded image column. Raises ImageError."""
    if image is None:
        raise ImageError("no image in this row")
    if image.get("bytes") is not None:
        return image["bytes"]
    return bytes(read_file(Path(image["path"]), max_pixels)[1])
