"""Starting the scripts in the tests, and reading what they leave behind."""

import json
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from places import ROOT, SMALL_CONFIGS
from safetensors.torch import load_file

HANGS_AFTER_S = 240  # of seconds, on a machine that is busy with other things too
REPORT = "toolkit.run.session_end:_report"  # which takes seconds at the end of every run
MICRO_BATCH = "toolkit.step.window:Window.begin_micro_batch"
EVALUATION = "toolkit.evaluation.predict_dataset:agree_max"
# What a run says about a loop that somebody has changed: never of a script as it is, whatever happens to its processes.
OF_CHANGED_LOOPS = ("learning rates that the loop set", "the loop passed over a window", "was not done", "t.without(")
SMALL = """
--data.format coco --data.image_size 64 --data.workers 0 --data.batch_size_per_device 4 --optim.ema_decay 0.9
--eval.batch_size_per_device 3 --eval.pictures 0 --run.name run --run.epochs 2 --run.max_minutes null --run.log_every 1
"""
TORCHRUN = Path(__file__).with_name("torchrun_forked.py")
CPU = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}


@dataclass(frozen=True)
class Script:
    """A training script; `configs/<name>.yaml` makes it small.

    one_size: arguments with which all training images have one size.
    changed: the file of a changed copy; None: the script as it is.
    """

    name: str
    one_size: tuple[str, ...] = ()
    changed: Path | None = None

    @property
    def path(self) -> Path:
        return self.changed or ROOT / "scripts" / f"{self.name}.py"

    @property
    def config(self) -> Path:
        return SMALL_CONFIGS / f"{self.name}.yaml"


SCRIPTS = (
    Script("train_detr"),
    Script("train_yolov3", one_size=("--data.multi_scale", "[]")),
    Script("train_faster_rcnn"),
    Script("train_sgg"),
    Script("train_ssd", one_size=("--data.multi_scale", "[]")),
)


def kill(call: int, at: str = MICRO_BATCH) -> dict:
    """The fault that kills all processes of a run before this call."""
    return {"signal": "SIGKILL", "at": at, "call": call, "rank": 0}


@dataclass
class Result:
    """How a run ended: exit code by rank, what all ranks printed, its folder."""

    codes: list[int]
    text: str
    folder: Path
    texts: list[str] = field(default_factory=list)

    @property
    def code(self) -> int:
        assert len(set(self.codes)) == 1, f"ranks ended differently: {self.codes}\n{self.text}"
        return self.codes[0]

    @property
    def status(self) -> dict:
        return json.loads((self.folder / "status.json").read_text())

    @property
    def numbers(self) -> dict:
        """What evaluate.py printed."""
        return json.loads(next(line for line in self.text.splitlines() if line.startswith("{")))

    @property
    def trained(self) -> list[int]:
        """The steps that have a row."""
        return [row["step"] for row in training_rows(self.folder)]

    def ok(self) -> "Result":
        assert set(self.codes) == {0}, f"exit codes {self.codes}\n{self.text}"
        return self

    def killed(self) -> "Result":
        assert set(self.codes) == {-9}, f"exit codes {self.codes}\n{self.text}"
        return self

    def refused(self, *words: str) -> "Result":
        """Ended with 2 and a message that has these words."""
        assert set(self.codes) == {2}, f"exit codes {self.codes}\n{self.text}"
        assert "Traceback" not in self.text, self.text
        assert "error: " in self.text, self.text
        for each in words:
            assert each in self.text, f"{each} is not in\n{self.text}"
        return self


class Server:
    """`server.py` and its runs; see there."""

    def __init__(self, folder: Path, env: dict[str, str]):
        self.folder, self.runs = folder, 0
        command = [sys.executable, str(Path(__file__).with_name("server.py"))]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | CPU | env, bufsize=0
        )
        self._read(240)

    def _read(self, timeout_s: float):
        """The next answer; None when there is none in time."""
        if not select.select([self.process.stdout], [], [], timeout_s)[0]:
            return None
        return json.loads(self.process.stdout.readline())

    def run(
        self,
        script: Script | Path,
        args,
        processes: int = 1,
        faults=(),
        *,
        whole: bool = False,
        env=None,
        meanwhile: Callable[[list[int]], None] | None = None,
        within_s: float = HANGS_AFTER_S,
    ) -> Result:
        """Runs a script on that many processes to its end, or fails the test when it takes longer than it may.

        args: a list, or a command line. whole: with its report. env: more environment variables. meanwhile: called with
        the process ids once they run.
        """
        is_changed = isinstance(script, Script) and script.changed is not None
        if isinstance(script, Script):
            faults, script = [*faults, *([] if whole else [{"skip": REPORT}])], script.path
        self.runs += 1
        args = words_of(args)
        logs = [self.folder / f"run{self.runs}_rank{rank}.log" for rank in range(processes)]
        for log in logs:
            log.touch()  # here: a process may be killed before it opens its own
        request = {
            "script": str(script),
            "args": args,
            "faults": list(faults),
            "cwd": str(self.folder),
            "logs": [str(log) for log in logs],
            "env": [e | (env or {}) for e in _ranks(processes)],
        }
        self.process.stdin.write((json.dumps(request) + "\n").encode())
        pids = self._read(60)
        if meanwhile is not None:
            meanwhile(pids)
        codes = self._read(within_s)
        hangs = codes is None
        if hangs:
            os.killpg(pids[0], signal.SIGKILL)
            codes = self._read(60)
        texts = [log.read_text(errors="replace") for log in logs]
        text = "".join(f"--- rank {rank}\n{text}" for rank, text in enumerate(texts))
        assert not hangs, f"the run hangs (or takes over {within_s} s): {args}\n{text}"
        blames = [words for words in OF_CHANGED_LOOPS if words in text]
        assert is_changed or not blames, f"the loop is as it was and is blamed: {blames}\n{text}"
        return Result(codes, text, run_folder(args), texts)

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(60)


def small_settings(script: Script, data: Path, args) -> list[str]:
    """The script's small settings on the COCO data set in `data`; those of `args` win."""
    files = f"--data.train {data}/annotations/train.json --data.val {data}/annotations/val.json"
    return flat({"--config": script.config} | pairs(f"{files} {SMALL}") | pairs(args))


def words_of(args) -> list[str]:
    """The words of a command line, or of a list of parts."""
    return shlex.split(args) if isinstance(args, str) else [str(arg) for arg in args]


def pairs(args) -> dict:
    """The values by flag, of a command line, a mapping, or a list of both in turn."""
    if isinstance(args, Mapping):
        return dict(args)
    words = shlex.split(args) if isinstance(args, str) else args
    return dict(zip(words[::2], words[1::2], strict=True))


def flat(settings: dict) -> list[str]:
    return [str(part) for pair in settings.items() for part in pair]


def run_folder(args: list[str]) -> Path:
    """The run folder that these arguments name."""
    given = dict(zip(args[::2], args[1::2], strict=False))  # of other programs not in pairs
    return Path(given.get("--run.output_dir", "runs")) / given.get("--run.name", "run")


def _ranks(processes: int) -> list[dict[str, str]]:
    if processes == 1:
        return [{}]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(processes)}
    shared |= {"LOCAL_WORLD_SIZE": str(processes)}
    return [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(command, env: dict[str, str] | None = None, cwd: Path | None = None) -> subprocess.Popen:
    """A real process of its own, such as `python`, `torchrun` or `accelerate launch`."""
    return subprocess.Popen(
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | CPU | (env or {}),
        cwd=cwd,
        start_new_session=True,
    )


def finish(process: subprocess.Popen, timeout_s: float = 300) -> tuple[int, str]:
    """(exit code, output) of `start`'s process; whatever is left of it is killed when it takes too long."""
    try:
        text = process.communicate(timeout=timeout_s)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise AssertionError(f"hangs: {process.args}\n{process.communicate()[0]}") from None
    return process.returncode, text


def all_rows(folder: Path) -> list[dict]:
    """Rows of metrics.jsonl without what a clock, the memory or the machine had to say."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    passing = ("time", "mem", "machine")
    return [{k: v for k, v in json.loads(line).items() if not k.startswith(passing)} for line in lines]


def rows(folder: Path) -> list[dict]:
    """Those of steps and evaluations."""
    return [row for row in all_rows(folder) if "epoch/loss" not in row]


def training_rows(folder: Path) -> list[dict]:
    return [row for row in rows(folder) if "train/loss" in row]


def checkpoint_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint by name: weights, averaged weights, optimizer; and the numbers of `t.extra`."""
    tensors = {f"{file.stem}/{k}": v for file in path.glob("*.safetensors") for k, v in load_file(file).items()}
    optimizer = torch.load(path / "optimizer.pt", weights_only=True)
    for index, state in optimizer["state"].items():
        tensors |= {f"optimizer/{index}/{k}": torch.as_tensor(v) for k, v in state.items()}
    for index, group in enumerate(optimizer["param_groups"]):
        tensors |= {f"group/{index}/{k}": torch.tensor(group[k]) for k in ("lr", "initial_lr", "weight_decay")}
    if (path / "extra.pt").exists():
        tensors |= dict(_numbers("extra", torch.load(path / "extra.pt", weights_only=True)))
    return tensors


def _numbers(name: str, value) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor | int | float):
        yield name, torch.as_tensor(value)
    elif isinstance(value, dict | list | tuple):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _numbers(f"{name}/{key}", part)


def checkpoint_state(path: Path) -> dict:
    """state.json without what a clock had to say."""
    state = json.loads((path / "state.json").read_text())
    log = state["parts"]["log"]
    log["meters"] = {name: meter for name, meter in log["meters"].items() if not name.startswith("time")}
    del log["elapsed_s"], log["epoch_s"]
    return state


def assert_same_run(folder: Path, reference: Path) -> None:
    """Rows, and the last checkpoint to the bit: weights, averages, optimizer and the rest of the state."""
    rows, expected = all_rows(folder), all_rows(reference)
    assert [row["step"] for row in rows] == [row["step"] for row in expected]
    for row, other in zip(rows, expected, strict=True):
        assert not _differences(row, other), f"row of step {row['step']}: {_differences(row, other)}"
    for link in ("latest", "best"):  # there is no best one where the metric was never defined
        if (reference / "checkpoints" / link).exists() or (folder / "checkpoints" / link).exists() or link == "latest":
            assert_same_checkpoint(folder / "checkpoints" / link, reference / "checkpoints" / link)


def assert_same_checkpoint(path: Path, reference: Path) -> None:
    assert path.resolve().name == reference.resolve().name
    tensors, expected = checkpoint_tensors(path), checkpoint_tensors(reference)
    assert tensors.keys() == expected.keys()
    different = [name for name in tensors if not torch.equal(tensors[name], expected[name])]
    assert not different, f"{path}: {len(different)} tensors differ from {reference}: {different[:10]}"
    differences = _differences(checkpoint_state(path), checkpoint_state(reference))
    assert not differences, f"{path}: {differences}"


def _differences(values: dict, expected: dict) -> dict:
    keys = values.keys() | expected.keys()
    return {key: (values.get(key), expected.get(key)) for key in keys if values.get(key) != expected.get(key)}


def nonfinite(path: Path) -> list[str]:
    """Names of the tensors of a checkpoint that hold a NaN or an infinity."""
    return [k for k, v in checkpoint_tensors(path).items() if v.is_floating_point() and not v.isfinite().all()]
