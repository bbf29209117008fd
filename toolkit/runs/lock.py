"""One run in one folder: a lock held as long as the main process runs; the kernel releases it when that process
dies."""

import json
import os
import socket
import time
from pathlib import Path

from filelock import FileLock, Timeout

from toolkit.errors import BadInput
from toolkit.runs.status import _now

LOCK = ".lock"


class FolderLock:
    """Holds `<run folder>/.lock`, in which its process stands by host, number and start; for the main process.

        with FolderLock() as lock:
            lock.take(folder)

    `flock` is known on every machine that shares the disk (NFS, Lustre and others do it where they are mounted so).
    Forked workers do not hold it.

    Attributes:
        note: one sentence where the file system has no locks, else "". The run goes on then.
        keep: whether the run has begun; else the file is left as it was found.
    """

    def __init__(self):
        self.note, self.keep = "", False
        self._path: Path | None = None
        self._found: bytes | None = None  # what another process left in the file
        self._lock: FileLock | None = None
        self._pid = 0

    def take(self, folder: Path) -> None:
        """Takes the lock of a run folder.

        Raises:
            BadInput: another process holds it; names its host, number and start. OSError: no right to write, no space.
        """
        path = Path(folder) / LOCK
        found = path.read_bytes() if path.exists() else None
        path.touch()  # raises where nothing can be written; what `acquire` raises after that is about locks
        # a moment for one that its holder removes just now; `note` says more than a lock of another kind would hold
        lock = FileLock(path, timeout=0.2, thread_local=False, fallback_to_soft=False)
        try:
            lock.acquire()
        except Timeout:
            raise BadInput(_in_use(path)) from None
        except OSError as error:
            self.note = (f"{path} cannot be locked here ({error.strerror}): see to it yourself that no other run "
                         "writes to this folder.")  # fmt: skip
        self._path, self._found, self._lock, self._pid = path, found, lock, os.getpid()
        path.write_text(json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "started": _now()}), "utf-8")

    def __enter__(self) -> "FolderLock":
        return self

    def __exit__(self, *exception) -> None:
        if self._path is None or self._pid != os.getpid():  # a forked worker
            return
        try:
            if self.keep or self._found is None:
                self._path.unlink(missing_ok=True)
            else:
                self._path.write_bytes(self._found)
        except OSError:  # a full or vanished disk: an old note in a file that nobody holds does no harm
            pass
        finally:
            self._path = None
            self._lock.release()


def _in_use(path: Path) -> str:
    holder: dict = {}
    for _ in range(20):  # taken a moment ago, it may not be written in yet
        try:
            holder = json.loads(path.read_text(encoding="utf-8"))
            break
        except (OSError, ValueError):
            time.sleep(0.05)
    who = "another process"
    if isinstance(holder, dict) and holder.keys() >= {"host", "pid", "started"}:
        who = f"process {holder['pid']} on {holder['host']}, since {holder['started']}"
    return (f"The run folder {path.parent} is in use by {who}. Wait for its end, or end it with a signal (kill saves "
            "its state), or choose another --run.name.")  # fmt: skip
