"""Reading the files that W&B writes without a network: `wandb/offline-run-*/run-*.wandb`."""

import struct
from collections.abc import Iterator
from pathlib import Path


def last_offline_step(folder: Path, run_id: str) -> int:
    """Last step that the offline W&B files of `run_id` under `folder` hold; -1 without any. Raises OSError."""
    files = Path(folder).glob(f"wandb/offline-run-*-{run_id}/run-{run_id}.wandb")
    return max((record.history.step.num for file in files for record in read_offline_wandb(file)
                if record.HasField("history")), default=-1)  # fmt: skip


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
