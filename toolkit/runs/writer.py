"""Where the numbers of a run go: metrics.jsonl first and always, then a tracker through Accelerate, then the console.

A tracker may fail, or have no network: one warning, and training goes on without it. What it missed it is sent from
metrics.jsonl when the run is resumed.
"""

import json
import os
import struct
import sys
import uuid
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
from PIL import Image

from toolkit.errors import BadInput
from toolkit.runs.failures import ERRORS, note_traceback
from toolkit.runs.metrics_log import MetricsLog, read_metrics

WANDB_INIT_TIMEOUT_S = 30
WANDB_FINISH_TIMEOUT_S = 300  # a network lost since must not keep a finished run waiting; older releases lack this


# ---------------------------------------------------------------- trackers


def tracker_kwargs(tracker: str, folder: Path) -> dict:
    """Arguments for `Accelerator(...)` that let it use `tracker` and keep its files in the run folder.

    Raises:
        BadInput: no such tracker, or not installed; lists those that are.
    """
    if tracker == "none":
        return {}
    available = sorted({str(name) for name in get_available_trackers()})
    if tracker not in LOGGER_TYPE_TO_CLASS:
        raise BadInput(f"--run.tracker {tracker}: no such tracker. Installed are: {', '.join(['none', *available])}.")
    if tracker not in available:
        raise BadInput(
            f"--run.tracker {tracker}: its package is not installed. Installed are: {', '.join(['none', *available])}."
        )
    return {"log_with": [tracker], "project_dir": str(folder)}


class RunWriter:
    """Writes the rows and pictures of one run; on other processes than the main one every method does nothing.

    Args:
        folder: the run folder.
        accelerator: built with `tracker_kwargs`; needed unless `tracker` is "none".
        tracker: a name that Accelerate knows, or "none".
        project: of the tracker. run_name: shown by the tracker; the folder's name when None.
        config: the resolved settings, nested as they are.
        is_main: this is the main process.
        resume_state: `state_dict()` out of the checkpoint that is resumed; None for a fresh start.
        eval_only: nothing is trained from there on, so the rows of later steps stay.

    The tracker's run id and the steps it was sent stand in `tracker.json`. A step is noted there before it is sent, so
    that a kill between the two cannot have it sent again; after a kill, W&B's server or offline files tell what it has.
    """

    def __init__(
        self,
        folder: Path,
        *,
        accelerator: Accelerator | None = None,
        tracker: str = "none",
        project: str = "detection-toolkit",
        run_name: str | None = None,
        config: Mapping | None = None,
        is_main: bool = True,
        resume_state: Mapping | None = None,
        eval_only: bool = False,
    ):
        self.folder = Path(folder)
        self.tracker = tracker if is_main else "none"
        self.run_id: str | None = None
        self._is_main = is_main
        self._accelerator = accelerator
        self._sent: dict[str, int] = {}  # kind of row -> last step sent
        self._floor = -1  # W&B has every step up to this one
        self._finished = False  # the tracker has all that it was sent
        if not is_main:
            return
        continues = resume_state is not None and (self.folder / "metrics.jsonl").exists()  # else a fork, or fresh
        kept = sys.maxsize if eval_only else resume_state["rows"] if continues else 0
        self._metrics = MetricsLog(self.folder / "metrics.jsonl", kept)
        if self.tracker != "none":
            self._start(project, run_name or self.folder.name, _flat(config or {}), resume_state if continues else None)
            for row in read_metrics(self._metrics.path):
                self._send(row)

    def state_dict(self) -> dict:
        """JSON values for the checkpoint: rows written so far, tracker, run id; the same keys on every process."""
        rows = self._metrics.rows if self._is_main else 0
        return {"rows": rows, "tracker": self.tracker, "run_id": self.run_id}

    def log(self, row: Mapping[str, float | int | str | None]) -> None:
        """Write one row: metrics.jsonl first, then the tracker. `row` has `step`, `epoch`, `time_s` and values."""
        if self._is_main:
            if not self._metrics.path.exists():  # writing to a file that was removed is no error for the system
                raise BadInput(f"{self._metrics.path} was removed while the run wrote to it. What is saved from now on "
                               "goes on with --run.resume latest; the rows so far are lost.")  # fmt: skip
            self._metrics.write(row)
            self._send(row)

    def log_images(self, images: Mapping[str, Path], step: int) -> None:
        """Show picture files (any format PIL reads) in the tracker under their names, unless it has this step's."""
        if self._is_main and self.tracker != "none" and self._note("images", step):
            self._guarded(self._show, images, step)

    def close(self) -> None:
        """Close the file and let the tracker finish; the process group stays. Raises OSError."""
        if self._is_main:
            self._metrics.close()
        if self.tracker != "none":
            self._guarded(self._finish)

    # Below: main process, tracker other than "none".

    def _start(self, project: str, run_name: str, config: dict, resume_state: Mapping | None) -> None:
        saved = _read_json(self.folder / "tracker.json") if resume_state is not None else {}
        if resume_state is not None and saved.get("tracker") == self.tracker:
            self._sent = {kind: int(step) for kind, step in saved.get("sent", {}).items()}
            self.run_id, self._finished = saved.get("run_id"), saved.get("finished", False)
        elif resume_state is not None and resume_state.get("tracker") == self.tracker:
            self.run_id = resume_state.get("run_id")
        if self.tracker == "wandb":
            self._guarded(self._start_wandb, project, run_name, config)
            return
        # Only a new run gets TensorBoard's table of settings; purging hides an attempt that left no checkpoint.
        kwargs = {"tensorboard": {"purge_step": 0} if resume_state is None else {}}
        first_config = config if resume_state is None or self.tracker != "tensorboard" else None
        name = "tensorboard" if self.tracker == "tensorboard" else project  # its folder in the run folder
        self._guarded(self._accelerator.init_trackers, name, first_config, kwargs)

    def _start_wandb(self, project: str, run_name: str, config: dict) -> None:
        import wandb  # half a second that only its users pay

        resumed, self.run_id = self.run_id is not None, self.run_id or uuid.uuid4().hex[:8]
        limits = {"init_timeout": WANDB_INIT_TIMEOUT_S, "finish_timeout": WANDB_FINISH_TIMEOUT_S}
        settings = wandb.Settings(**{k: v for k, v in limits.items() if k in wandb.Settings.model_fields})
        options = {"id": self.run_id, "name": run_name, "dir": str(self.folder), "settings": settings}
        online = {} if os.environ.get("WANDB_MODE") == "offline" else {"resume": "allow"}
        try:
            with _no_prompts():
                self._accelerator.init_trackers(project, config, {"wandb": options | online})
        except (wandb.errors.UsageError, wandb.errors.CommError) as error:  # no key; no network
            self._accelerator.trackers.clear()
            warnings.warn(
                f"W&B cannot be reached ({str(error).partition(chr(10))[0]}); logging offline. Send it later with "
                f"`wandb sync {self.folder}/wandb/offline-run-*`.",
                stacklevel=2,
            )
            wandb.teardown()  # or it holds the failed attempt's id to be in use
            self._accelerator.init_trackers(project, config, {"wandb": options | {"mode": "offline"}})
        run = self._accelerator.get_tracker("wandb", unwrap=True)
        if resumed and not self._finished:  # killed: what was sent last may never have reached the server or a file
            self._sent, self._floor = {}, max(run.step - 1, last_offline_step(self.folder, self.run_id))
        self._finished = False
        self._save()

    def _send(self, row: Mapping) -> None:
        if self.tracker == "none":
            return
        step = row["step"]
        values = {k: v for k, v in row.items() if k != "step" and isinstance(v, int | float | np.number)}
        kinds = [kind for kind in ("train", "epoch", "val") if any(k.startswith(f"{kind}/") for k in values)]
        if self._note(kinds[0] if kinds else "val", step):
            self._guarded(self._accelerator.log, values, step)

    def _note(self, kind: str, step: int) -> bool:
        """Note that the tracker gets this step's row of this kind; False if it has it already."""
        if step <= max(self._floor, self._sent.get(kind, -1)):
            return False
        self._sent[kind] = step
        self._guarded(self._save)
        return True

    def _save(self) -> None:
        # Replaced at each row, so without the flushes to the disk that survive a power cut.
        path = self.folder / "tracker.json"
        temp = path.with_name(".tmp-tracker.json")
        state = {"tracker": self.tracker, "run_id": self.run_id, "sent": self._sent, "finished": self._finished}
        temp.write_text(json.dumps(state), "utf-8")
        os.replace(temp, path)

    def _show(self, images: Mapping[str, Path], step: int) -> None:
        for name, path in images.items():
            with Image.open(path) as image:
                picture = np.asarray(image.convert("RGB"))[None]  # (1, H, W, 3)
            for tracker in self._accelerator.trackers:
                if hasattr(tracker, "log_images"):
                    layout = {"dataformats": "NHWC"} if tracker.name == "tensorboard" else {}
                    tracker.log_images({name: picture}, step=step, **layout)

    def _finish(self) -> None:
        # Not Accelerator.end_training, which ends the process group too, and needs every process.
        for tracker in self._accelerator.trackers:
            tracker.finish()
        self._accelerator.trackers.clear()
        self._finished = True
        self._save()

    def _guarded(self, call, *args) -> None:
        """Call into the tracker; what it raises costs one warning and the tracker, never the training."""
        try:
            call(*args)
        except Exception as error:  # noqa: BLE001  trackers raise what they like: their own, requests', protobuf's
            note_traceback(self.folder, f"tracker {self.tracker}")
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            warnings.warn(
                f"The tracker {self.tracker} failed and is switched off ({reason}). Training goes on; "
                f"{self.folder}/metrics.jsonl has every row, {ERRORS} the traceback.",
                stacklevel=3,
            )
            self.tracker = "none"
            self._accelerator.trackers.clear()


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


@contextmanager
def _no_prompts() -> Iterator[None]:
    """W&B asks for an account when it has no key and a terminal; nobody may be there to answer."""
    stdin = sys.stdin
    with open(os.devnull, encoding="utf-8") as nothing:
        sys.stdin = nothing
        try:
            yield
        finally:
            sys.stdin = stdin


def _flat(config: Mapping, prefix: str = "") -> dict:
    """Nested settings as {"optim.lr": 1e-4}; what is no number or text becomes text, which every tracker takes."""
    flat = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value if isinstance(value, bool | int | float | str) else str(value)
    return flat


def _read_json(path: Path) -> dict:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


# ---------------------------------------------------------------- console


