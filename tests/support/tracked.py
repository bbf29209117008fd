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
        media = file.parent / "files"
        for record in read_offline_wandb(file):
            if record.HasField("run"):
                run = record.run
                found |= {"group": run.run_group, "job_type": run.job_type, "tags": list(run.tags), "notes": run.notes}
            elif record.HasField("metric"):
                found["metrics"][record.metric.name or record.metric.glob_name] = record.metric.step_metric
            elif record.HasField("summary"):
                found["summary"] |= _items(record.summary.update)
            elif record.HasField("artifact"):
                artifact = record.artifact
                entries = artifact.manifest.contents
                found["artifacts"].setdefault(artifact.type, []).append({
                    "name": artifact.name, "digest": artifact.digest, "aliases": list(artifact.aliases),
                    "files": {e.path for e in entries if not e.ref}, "references": {e.ref for e in entries if e.ref},
                })  # fmt: skip
            elif record.HasField("history"):
                items = _items(record.history.item)
                for key in {k.rpartition("/")[0] for k in items if k.endswith("/path")}:
                    if items.get(f"{key}/_type") == "table-file":
                        found["tables"][key] = json.loads((media / items[f"{key}/path"]).read_text())["data"]
                if "val/predictions/all_boxes" in items:
                    layers = items["val/predictions/all_boxes"]
                    found["boxes"][record.history.step.num] = [
                        {name: _boxes(media / layer["path"]) for name, layer in image.items()} for image in layers]
    return found  # fmt: skip


def _boxes(path: Path) -> list[tuple]:
    """(caption, class id, corners in pixels, score) of each box in a media file of W&B."""
    corners = ("minX", "minY", "maxX", "maxY")
    return [(box["box_caption"], box["class_id"], [box["position"][k] for k in corners],
             box.get("scores", {}).get("score")) for box in json.loads(path.read_text())["box_data"]]  # fmt: skip


def _items(items) -> dict:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def read_offline_wandb(path: Path) -> Iterator:
    """The protobuf `Record`s of a `.wandb` file, up to where it was cut off.

    The file is a LevelDB log (github.com/google/leveldb, doc/log_format.md) behind seven bytes of its own: blocks of
    32 KiB, chunks of crc32, length and type (1 whole, 2 first, 3 middle, 4 last).
    """
    from google.protobuf.message import DecodeError
    from wandb.proto.wandb_internal_pb2 import Record

    data, position, parts = Path(path).read_bytes(), 7, b""
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
