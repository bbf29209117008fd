"""Local folders of the `datasets` library: `save_to_disk`, Parquet files, images with `metadata.jsonl`.

The library is imported where it is used, because its import would delay the start of every run.
"""

from pathlib import Path

from toolkit.base.files import read_json
from toolkit.data.annotations import Reading
from toolkit.data.formats.annotated import SPLIT_NAMES, ordered, split_of
from toolkit.data.table import DetectionTable

TITLE = "datasets"


def recognise(folder: Path) -> tuple[str, ...] | None:
    """Return the names of the splits of a local `datasets` folder; None if it is not one."""
    names = _split_names(folder)
    if not names:
        return None
    return ordered(split_of(name) or name for name in names)


def unused(folder: Path) -> list[str]:
    """Return the names of splits that are not read because another name of the same split comes first.

    An example is `dev` if there is `validation` too.
    """
    names = _split_names(folder)
    return [name for name in names if _own_name(names, split_of(name) or name) != name]


def _own_name(names: list[str], split: str) -> str:
    """Return the folder's name of a split; of several names the split's own, then the first."""
    alike = [name for name in names if name == split or split_of(name) == split]
    if split in alike or not alike:
        return split
    return alike[0]


def read(folder: Path, split: str, reading: Reading) -> DetectionTable:
    """Read one split; `reading.image_dir` is ignored, because the images are in the data."""
    from toolkit.data.formats.hub import open_hub

    return open_hub(str(folder), _own_name(_split_names(folder), split), reading)


def _split_names(folder: Path) -> list[str]:
    """Return the names of the splits as the folder has them."""
    if not folder.is_dir():
        return []
    if (folder / "dataset_dict.json").exists():
        splits = read_json(folder / "dataset_dict.json").get("splits")
        return [str(split) for split in splits] if isinstance(splits, list) else []
    if (folder / "state.json").exists():
        return [str(read_json(folder / "state.json").get("_split") or "train")]
    directories = [folder, folder / "data"]
    for names in SPLIT_NAMES.values():
        directories += [folder / name for name in names]
    if not any(map(_has_data_files, directories)):
        return []
    import datasets
    from datasets.exceptions import DatasetsError

    try:
        return list(datasets.get_dataset_split_names(str(folder)))
    except (OSError, ValueError, RuntimeError, DatasetsError):
        return []


def _has_data_files(folder: Path) -> bool:
    patterns = ("*.parquet", "metadata.jsonl", "*.arrow")
    return any(any(folder.glob(pattern)) for pattern in patterns)
