"""One run in one folder: a lock that lives as long as the main process, freed by the kernel when that dies."""

import errno
import json
import os
import socket
import time
import weakref
from pathlib import Path

from toolkit.errors import BadInput
from toolkit.runs.status import _now

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

LOCK = ".lock"
_HELD: weakref.WeakSet = weakref.WeakSet()


class FolderLock:
    """Holds `<run folder>/.lock`, in which its process stands by host, number and start; for the main process.

        with FolderLock() as lock:
            lock.take(folder)

    `flock` is known on every machine that shares the disk (NFS, Lustre and others do it where they are mounted so).

    Attributes:
        note: one sentence where the file system has no locks, else "". The run goes on then.
        keep: whether the run has begun; else the file is left as it was found.
    """

    def __init__(self):
        self.note, self.keep = "", False
        self._path: Path | None = None
        self._found: bytes | None = None  # what another process left in the file
        self._descriptor: int | None = None

    def take(self, folder: Path) -> None:
        """Takes the lock of a run folder.

        Raises:
            BadInput: another process holds it; names its host, number and start. OSError: no right to write, no space.
        """
        self._path = Path(folder) / LOCK
        while True:
            found = self._path.read_bytes() if self._path.exists() else None
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                if not self._lock(descriptor):
                    raise BadInput(_in_use(self._path))
                if _same_file(descriptor, self._path):  # not one that its last holder has just removed
                    break
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)
        self._found, self._descriptor = found, descriptor
        _HELD.add(self)
        self._write(json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "started": _now()}).encode())

    def _lock(self, descriptor: int) -> bool:
        """False: another process has it. Where there are no locks, `note` says so."""
        try:
            if fcntl is None:
                raise OSError(errno.ENOSYS, "no locks on this system")
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            self.note = (f"{self._path} cannot be locked here ({error.strerror}): see to it yourself that no other run "
                         "writes to this folder.")  # fmt: skip
        return True

    def _write(self, content: bytes) -> None:
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, content, 0)

    def __enter__(self) -> "FolderLock":
        return self

    def __exit__(self, *exception) -> None:
        if self._descriptor is None:
            return
        try:
            if self.keep or self._found is None:
                self._path.unlink(missing_ok=True)
            else:
                self._write(self._found)
        except OSError:  # a full or vanished disk: an old note in a file that nobody holds does no harm
            pass
        finally:
            self._drop()

    def _drop(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def _same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


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


def _drop_in_child() -> None:
    """A worker that outlives its trainer must not keep the folder locked. Closing a copy does not free the lock."""
    for lock in list(_HELD):
        lock._drop()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_drop_in_child)
