"""Ends all processes of a run soon after one of them has failed, and reports the first cause on the main process.

A process that waits in a collective does not notice that another process is gone: NCCL waits for its timeout, and so
does gloo while nothing is being sent. Therefore every process keeps a connection to the main process. If a process
dies, the kernel closes the connection at once, whatever the process was doing, so that no timeout is needed which a
long evaluation could exceed. A process that fails reports the cause before it ends, and the main process passes the
cause on. A process that hangs is detected only when the collectives of the other processes time out
(`run.hang_minutes`); then all processes end. With gloo the timeout is an error, which is passed on; with NCCL its own
watchdog aborts the waiting process, which looks to the others as if it had been killed.

The agent of torchrun, with `torch.distributed.elastic.multiprocessing.errors.record`, does not replace this. It was
measured with two processes, of which one failed while the other was busy outside of a collective (torch 2.14). The
agent alone sent SIGTERM, which a run answers by saving at its next step, and SIGKILL 30 s later; `status.json` then
said `running`. On a second machine, and without torchrun, the other process went on to its end and recorded `done`.
With the watchdog it ended after 20 s in all three cases, with the first cause and its exit code.
"""

import faulthandler
import json
import os
import re
import secrets
import select
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from toolkit.base.distributed import run_on_main, world
from toolkit.base.errors import BadInput, FailedElsewhere, Preempted, StoppedByGuard
from toolkit.run.status import STATES, state_after

# Of the environment: the port of the main machine where the others connect; without it any free one.
PORT_VARIABLE = "DETECTION_TOOLKIT_WATCHDOG_PORT"
GRACE_S = 20.0  # for a process to end by itself, before it is ended, once another one has failed
CONNECT_S = 30.0
LEAVE_S = 40.0
WORD_S = 15.0  # how long a collective that broke waits for the cause
_TIMED_OUT = re.compile(r"timed? ?out", re.IGNORECASE)
_BROKEN_COLLECTIVE = re.compile(r"gloo|nccl|connection (closed|reset|refused)|broken pipe|store", re.IGNORECASE)


class Hanging(FailedElsewhere):
    """Another process has not joined a collective within the timeout."""


@contextmanager
def watchdog(record: Callable[[str, str], None], grace_s: float = GRACE_S) -> Iterator[None]:
    """End all processes if one of them fails during a `with` block; they end within about `grace_s` seconds, and raise
    or print the first cause.

    Args:
        record: writes a state and its reason to `status.json`; called if this process hangs in its main thread and is
            ended from another thread.
        grace_s: seconds that a process has to end by itself.

    Raises:
        BadInput, StoppedByGuard, Preempted, FailedElsewhere: another process has failed; this is its failure, raised
            instead of the error of the collective that failed because of it.
    """
    rank, world_size = world()
    if world_size == 1:
        yield
        return
    watch = _Watch(rank, world_size, record, grace_s)
    watch.connect()
    try:
        yield
    except BaseException as error:
        cause = watch.cause_of(error)
        watch.fail(cause or error)
        if cause is not None:
            raise cause from error
        raise
    watch.leave()


class _Watch:
    """The connections of this process, and the thread that listens to them."""

    def __init__(self, rank: int, world_size: int, record: Callable[[str, str], None], grace_s: float):
        self.rank = rank
        self.world_size = world_size
        self.record = record
        self.grace_s = grace_s
        self.peers: dict[socket.socket, int] = {}
        self.left: set[int] = set()
        self.first: dict | None = None  # {"rank", "state", "reason"} of what failed first, on another process
        self.known, self.over = threading.Event(), threading.Event()
        self.lock = threading.Lock()

    # ---- connecting, which all processes do together

    def connect(self) -> None:
        host = os.environ.get("MASTER_ADDR", "127.0.0.1")  # where the others have found the main process already
        listener = None

        def listen() -> tuple[int, str]:
            nonlocal listener
            listener = _server(os.environ.get(PORT_VARIABLE) or "0", backlog=self.world_size)
            return listener.getsockname()[1], secrets.token_hex(16)

        port, token = run_on_main(listen)
        try:
            if listener:
                self._accept(listener, token)
            else:
                peer = socket.create_connection((host, port), timeout=CONNECT_S)
                _send(peer, {"rank": self.rank, "token": token})
                self.peers[peer] = 0
        except OSError as error:
            warning = f"the processes of the run cannot watch over each other ({error})"
            warnings.warn(f"{warning}: if one fails, others may wait for it.", stacklevel=2)
        finally:
            if listener:
                listener.close()
        for peer in self.peers:
            _keep_alive(peer)
        threading.Thread(target=self._listen, name="watchdog", daemon=True).start()

    def _accept(self, listener: socket.socket, token: str) -> None:
        until = time.monotonic() + CONNECT_S
        while len(self.peers) < self.world_size - 1:
            listener.settimeout(max(0.1, until - time.monotonic()))
            peer, _ = listener.accept()
            peer.settimeout(5.0)
            word = _Reader(peer).read()
            if word and word[0].get("token") == token:
                self.peers[peer] = word[0]["rank"]
            else:
                peer.close()

    # ---- the main thread

    def cause_of(self, error: BaseException) -> Exception | None:
        """Return the failure of another process that broke a collective here; None if `error` is this process's own."""
        is_own = isinstance(error, BadInput | StoppedByGuard | Preempted | KeyboardInterrupt | SystemExit)
        if not is_own and isinstance(error, RuntimeError | OSError) and _BROKEN_COLLECTIVE.search(str(error)):
            self.known.wait(WORD_S)
        if is_own:
            return None
        if self.first is None and isinstance(error, RuntimeError) and _TIMED_OUT.search(str(error)):
            return Hanging(
                f"rank {self.rank} has waited longer than run.hang_minutes for another process. That one hangs, and "
                "its output shows where; or an evaluation takes longer, then raise it"
            )
        return None if self.first is None else _as_error(self.first)

    def fail(self, error: BaseException) -> None:
        """Tell the others why this process ends."""
        state = state_after(error)
        defect = state == "failed" and not isinstance(error, FailedElsewhere)
        reason = f"{type(error).__name__}: {error}" if defect else str(error)
        hangs = isinstance(error, Hanging)
        self._tell(self.first or {"rank": self.rank, "state": state, "reason": reason, "hangs": hangs})
        self.over.set()
        if self.rank:  # a last resort, of a process that hangs on its way out; the main one may be sending rows
            faulthandler.dump_traceback_later(LEAVE_S, exit=True)

    def leave(self) -> None:
        self._tell({"rank": self.rank, "state": "over", "reason": ""})
        self.over.set()

    def _tell(self, word: dict) -> None:
        with self.lock:
            for peer in list(self.peers):
                try:
                    _send(peer, word)
                except OSError:
                    continue

    # ---- the thread

    def _listen(self) -> None:
        readers = {peer: _Reader(peer) for peer in self.peers}
        while readers and not self.over.is_set() and self.first is None:
            for peer in select.select(list(readers), [], [], 0.5)[0]:
                rank = self.peers[peer]
                try:
                    words = readers[peer].read()
                except OSError:
                    words = []
                why = "it ended without a message: was it killed, or out of memory?"
                gone = {"rank": rank, "state": "failed", "reason": why}
                for word in words or [gone]:
                    if word["state"] == "over":
                        del readers[peer]
                        break
                    self.first = self.first or word
        if self.first is None:
            return
        self.known.set()
        self._tell(self.first)
        if not self.over.wait(self.grace_s):
            self._end()

    def _end(self) -> None:
        """End this process, whose main thread waits for a message that will never come."""
        error = _as_error(self.first)
        state = self.first["state"]
        if self.first.get("hangs"):
            faulthandler.dump_traceback()  # this one may be it
        try:
            self.record(state, str(error))
        except (OSError, ValueError) as unwritable:
            print(f"status.json could not be written: {unwritable}", file=sys.stderr)
        where = f" on rank {self.rank}" if self.rank else ""
        print(f"stopped{where}: {error}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(error.exit_code)


def _server(port: str, backlog: int) -> socket.socket:
    """Return a listening socket on a port. Raises BadInput if the port cannot be used."""
    why = "expected a number from 1 to 65535"
    if port.isdecimal() and int(port) < 1 << 16:
        try:
            return socket.create_server(("", int(port)), backlog=backlog)
        except OSError as error:
            why = error.strerror
    raise BadInput(
        f"{PORT_VARIABLE} is {port}: the main process cannot listen there ({why}). "
        "Choose another port, or unset it: a free one is then taken."
    )


def _as_error(word: dict) -> Exception:
    if word.get("hangs"):
        return FailedElsewhere(word["reason"])
    return STATES.get(word["state"], FailedElsewhere)(f"rank {word['rank']} failed: {word['reason']}")


class _Reader:
    """Lines of JSON out of a socket."""

    def __init__(self, peer: socket.socket):
        self.peer = peer
        self.buffer = b""

    def read(self) -> list[dict]:
        """Receive what has come, at least one whole line; empty when the other side has closed."""
        while b"\n" not in self.buffer:
            data = self.peer.recv(65536)
            if not data:
                return []
            self.buffer += data
        *lines, self.buffer = self.buffer.split(b"\n")
        return [json.loads(line) for line in lines]


def _send(peer: socket.socket, word: dict) -> None:
    peer.sendall(json.dumps(word).encode() + b"\n")


def _keep_alive(peer: socket.socket) -> None:
    """Let the kernel probe a silent connection after ten seconds, and give up on it after forty."""
    peer.settimeout(5.0)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 40_000)):
        if hasattr(socket, name):
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
