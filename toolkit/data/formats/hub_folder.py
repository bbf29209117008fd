"""Local folders of the `datasets` library: `save_to_disk`, Parquet files, images with `metadata.jsonl`.

The library is imported where it is used, because its import would delay the start of every run.
"""

from itertools import chain
from pathlib import Path

from toolkit.base.files import read_json
from toolkit.data.annotations import Reading
from toolkit.data.layout import SPLIT_NAMES, Layout, Splits, split_of
from toolkit.data.table import DetectionTable

TITLE = "datasets"
DATA_SUFFIXES = (".parquet", ".arrow")
METADATA = "metadata.jsonl"


def find(layout: Layout) -> Splits | None:
    """Return the splits of a local `datasets` folder; None if it is not one.

    The source of a split is `<folder>/<the folder's own name of it>`, such as `validation` for `val`, whether that is a
    folder or not. Of several names for one split its own counts, then the first: `dev` is not used if there is `val`.
    """
    names = _split_names(layout)
    own_names: dict[str, str] = {}
    for name in names:
        split = split_of(name) or name
        own_names[split] = name if name == split else own_names.get(split, name)
    sources = {split: [layout.folder / name] for split, name in own_names.items()}
    return Splits(layout, sources, [layout.folder / name for name in names]) if names else None


def read(found: Splits, split: str, reading: Reading) -> DetectionTable:
    """Read one split; `reading.image_dir` is ignored, because the images are in the data."""
    from toolkit.data.formats.hub import open_hub

    (source,) = found.sources[split]
    return open_hub(str(found.folder), str(source.relative_to(found.folder)), reading)


def _split_names(layout: Layout) -> list[str]:
    """Return the names of the splits as the folder has them."""
    folder = layout.folder
    if not folder.is_dir():
        return []
    if (folder / "dataset_dict.json").exists():
        splits = read_json(folder / "dataset_dict.json").get("splits")
        return [str(split) for split in splits] if isinstance(splits, list) else []
    if (folder / "state.json").exists():
        return [str(read_json(folder / "state.json").get("_split") or "train")]
    of_splits = chain.from_iterable(SPLIT_NAMES.values())
    directories = [folder, folder / "data", *(folder / name for name in of_splits)]
    if not any(_has_data(layout, directory) for directory in directories):
        return []
    import datasets
    from datasets.exceptions import DatasetsError

    try:
        return list(datasets.get_dataset_split_names(str(folder)))
    except (OSError, ValueError, RuntimeError, DatasetsError):
        return []


def _has_data(layout: Layout, folder: Path) -> bool:
    """Return whether a folder has data files, or folders of their parts, which are called like files."""
    names = [*layout.names(folder), *(inner.name for inner in layout.folders(folder))]
    return METADATA in names or any(name.endswith(DATA_SUFFIXES) for name in names)
