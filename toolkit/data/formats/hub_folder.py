"""Local folders of the `datasets` library: `save_to_disk`, Parquet files, images with `metadata.jsonl`.

The library is imported where it is used, because its import would delay the start of every run.
"""

from collections.abc import Iterator
from pathlib import Path

from toolkit.base.files import read_json
from toolkit.data.formats.annotated import SPLIT_NAMES, ordered, split_of
from toolkit.data.image_sources import ImageSources, size_of
from toolkit.data.table import DetectionTable, LabelledImages

TITLE = "datasets"


def recognise(folder: Path) -> tuple[str, ...] | None:
    """Return the names of the splits of a local `datasets` folder; None if it is not one."""
    names = _names(folder)
    return ordered(split_of(name) or name for name in names) if names else None


def unused(folder: Path) -> list[str]:
    """Return the names of splits that another one takes precedence over: `dev` if there is `validation`."""
    names = _names(folder)
    return [name for name in names if _own_name(names, split_of(name) or name) != name]


def _own_name(names: list[str], split: str) -> str:
    """Return the folder's name of a split; of several names the split's own, then the first."""
    alike = [name for name in names if name == split or split_of(name) == split]
    return split if split in alike or not alike else alike[0]


def read(folder: Path, split: str, *, image_dir: Path | ImageSources | None = None, **options) -> DetectionTable:
    """Read one split; `image_dir` is ignored, since the images are in the data."""
    from toolkit.data.formats.hub import open_hub

    return open_hub(str(folder), _own_name(_names(folder), split), **options)


def write(table: DetectionTable, folder: Path, split: str, *, link: bool = False) -> None:
    """Write `data/<split>-*.parquet` with the encoded images in it, in files of about 500 MB.

    Category ids, relations and attributes are not written: the format has no columns for them.
    """
    import datasets

    value = datasets.Value
    several = datasets.List
    objects = {
        "id": several(value("int64")),
        "bbox": several(several(value("float32"), length=4)),
        "category": several(datasets.ClassLabel(names=table.class_names)),
        "area": several(value("float32")),
        "iscrowd": several(value("bool")),
    }
    columns = {
        "image_id": value("string" if table.image_ids().dtype == object else "int64"),
        "image": datasets.Image(),
        "width": value("int64"),
        "height": value("int64"),
        "objects": objects,
    }
    features = datasets.Features(columns)
    (folder / "data").mkdir(parents=True, exist_ok=True)
    labelled = table.labelled()
    parts = max(1, -(-_bytes(table) // 500_000_000))
    for part in range(parts):
        first, last = (len(table) * at // parts for at in (part, part + 1))
        rows = datasets.Dataset.from_list(list(_rows(table, labelled, first, last)), features=features)
        target = folder / "data" / f"{'validation' if split == 'val' else split}-{part:05d}-of-{parts:05d}.parquet"
        rows.to_parquet(str(target))


def _rows(table: DetectionTable, labelled: LabelledImages, first: int, last: int) -> Iterator[dict]:
    boxes = labelled.boxes
    columns = {
        "id": boxes.ids,
        "bbox": boxes.xywh,
        "category": boxes.labels,
        "area": boxes.area,
        "iscrowd": boxes.iscrowd,
    }
    for index in range(first, last):
        image = labelled.images[index]
        part = boxes.of_image(index)
        source = table.image_source(table.row(index))
        data = source if isinstance(source, bytes) else source.read_bytes()
        about = {"image_id": image.image_id, "width": image.width, "height": image.height}
        objects = {name: column[part].tolist() for name, column in columns.items()}
        yield about | {"image": {"bytes": data, "path": image.file_name}, "objects": objects}


def _bytes(table: DetectionTable) -> int:
    sources = (table.image_source(table.row(index)) for index in range(len(table)))
    return sum(len(source) if isinstance(source, bytes) else size_of(source) for source in sources)


def _names(folder: Path) -> list[str]:
    """Return the names of the splits as the folder has them."""
    if not folder.is_dir():
        return []
    if (folder / "dataset_dict.json").exists():
        splits = read_json(folder / "dataset_dict.json").get("splits")
        return [str(split) for split in splits] if isinstance(splits, list) else []
    if (folder / "state.json").exists():
        return [str(read_json(folder / "state.json").get("_split") or "train")]
    directories = [folder, folder / "data", *(folder / name for names in SPLIT_NAMES.values() for name in names)]
    patterns = ("*.parquet", "metadata.jsonl", "*.arrow")
    if not any(any(directory.glob(pattern)) for directory in directories for pattern in patterns):
        return []
    import datasets
    from datasets.exceptions import DatasetsError

    try:
        return list(datasets.get_dataset_split_names(str(folder)))
    except (OSError, ValueError, RuntimeError, DatasetsError):
        return []
