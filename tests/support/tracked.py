"""What the offline W&B files of a run hold, for tests of trackers and of whole runs."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path


def offline_history(folder: Path) -> list[tuple[str, int, dict]]:
    """Run id, step and values of each row in the run's offline files, in the order in which they were written."""
    rows = []
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        run_id = None
        for record in read_offline_wandb(file):
            run_id = record.run.run_id if record.HasField("run") else run_id
            if record.HasField("history"):
                rows.append((run_id, record.history.step.num, _items(record.history.item)))
    return rows


def offline_records(folder: Path) -> dict:
    """What else is in the run's offline files: boxes by step, tables by key, artifacts by type, the last summary."""
    found = {"metrics": {}, "boxes": {}, "tables": {}, "artifacts": {}, "summary": {}}
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for record in read_offline_wandb(file):
            if record.HasField("run"):
                run = record.run
                found |= {"group": run.run_group, "job_type": run.job_type, "tags": list(run.tags), "notes": run.notes}
            elif record.HasField("metric"):
                found["metrics"][record.metric.name or record.metric.glob_name] = record.metric.step_metric
            elif record.HasField("summary"):
                found["summary"] |= _items(record.summary.update)
            elif record.HasField("artifact"):
                found["artifacts"].setdefault(record.artifact.type, []).append(_artifact(record.artifact))
            elif record.HasField("history"):
                _add_media(found, file.parent / "files", record.history)
    return found


def _artifact(artifact) -> dict:
    entries = artifact.manifest.contents
    return {
        "name": artifact.name,
        "digest": artifact.digest,
        "aliases": list(artifact.aliases),
        "files": {entry.path for entry in entries if not entry.ref},
        "references": {entry.ref for entry in entries if entry.ref},
    }


def _add_media(found: dict, media: Path, history) -> None:
    """Add the tables and the boxes of a step, whose files lie in the folder `media`."""
    items = _items(history.item)
    for key in {name.rpartition("/")[0] for name in items if name.endswith("/path")}:
        if items.get(f"{key}/_type") == "table-file":
            found["tables"][key] = json.loads((media / items[f"{key}/path"]).read_text())["data"]
    images = []
    for image in items.get("val/predictions/all_boxes", ()):
        images.append({name: _boxes(media / layer["path"]) for name, layer in image.items()})
    if "val/predictions/all_boxes" in items:
        found["boxes"][history.step.num] = images


def _boxes(path: Path) -> list[tuple]:
    """(caption, class id, corners in pixels, score) of each box in a media file of W&B."""
    boxes = []
    for box in json.loads(path.read_text())["box_data"]:
        corners = [box["position"][key] for key in ("minX", "minY", "maxX", "maxY")]
        boxes.append((box["box_caption"], box["class_id"], corners, box.get("scores", {}).get("score")))
    return boxes


def _items(items) -> dict:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def read_offline_wandb(path: Path) -> Iterator:
    """The protobuf `Record`s of a `.wandb` file, up to where it was cut off.

    The file is a LevelDB log (github.com/google/leveldb, doc/log_format.md) behind seven bytes of its own: blocks of
    32 KiB, chunks of crc32, length and type (1 whole, 2 first, 3 middle, 4 last).
    """
    from google.protobuf.message import DecodeError
    from wandb.proto.wandb_internal_pb2 import Record

    data = Path(path).read_bytes()
    position = 7
    parts = b""
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:  # padding at the end of a block
            position += left
            continue
        length, kind = struct.unpack_from("<HB", data, position + 4)
        part = data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind not in (1, 2, 3, 4) or len(part) < length:
            return
        parts = part if kind in (1, 2) else parts + part
        if kind in (1, 4):
            try:
                yield Record.FromString(parts)
            except DecodeError:
                return
