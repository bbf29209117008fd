"""The cost of a step, its collectives and a checkpoint on one and on several processes: the figures of docs/scaling.md.

    python scripts/benches/scaling.py                          # 1, 2 and 4 processes: minutes
    python scripts/benches/scaling.py --processes 1 --steps 5  # shows that it runs

Each run is scripts/train_detr.py itself, with clocks around the calls of its loop. Processes share the cores of this
machine, so the seconds of several processes show the time that is added to a step, not the speed of a larger machine.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from toolkit.tools.arguments import ShortUsage
from toolkit.tools.shapes import ensure_shapes

STEP_PARTS = ["wait for data", "forward", "criterion", "backward", "gradient norm", "what the step must know", "guard"]
STEP_PARTS += ["optimizer", "averaged weights", "meters and rows", "the rest"]
DRIVEN = "--driven"
FASTEST = 25  # percentile over the steps: other work of the machine makes a step slower, never faster


def bench_scaling(processes: Sequence[int] = (1, 2, 4), steps: int = 40, options: Sequence[str] = ()) -> list[dict]:
    """Measure training with each number of processes, after two steps that are not counted. Return rows with `name`,
    `value` and `unit`.

    options: further arguments of scripts/train_detr.py.
    """
    ensure_shapes()
    rows = []
    for count in processes:
        measured = _measure(count, steps + 2, options)
        parts = ("a step", "a step, processor time", *STEP_PARTS)
        measurements = [(part, measured["parts"][part], "s") for part in parts]
        measurements += [(name, size, "bytes/step") for name, size in measured["bytes"].items()]
        measurements += [("checkpoint", measured["checkpoint"], "MB"), ("checkpoint", measured["save"], "s")]
        measurements += [("evaluation of 200 images", measured["evaluate"], "s")]
        measurements += [("trained", measured["parameters"], "parameters")]
        title = f"scaling, {count} processes"
        rows += [{"name": f"{title}, {name}", "value": value, "unit": unit} for name, value, unit in measurements]
    return rows


def _measure(count: int, steps: int, options: Sequence[str]) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        given = f"--run.name run --run.max_steps {steps} --run.save_every {steps - 1} --run.eval_every 0".split()
        given += ["--run.output_dir", folder, "--run.log_every", "1", "--run.max_minutes", "null", *options]
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(count)] if count > 1 else []
        command = [sys.executable, *launcher, __file__, DRIVEN, str(Path(folder) / "measured.json"), *given]
        environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
        return json.loads((Path(folder) / "measured.json").read_text())


class Clocks:
    """Clocks for the parts of each step in seconds, and counters of the bytes that collectives carry."""

    def __init__(self):
        self.parts: dict[str, list[float]] = defaultdict(list)
        self.now: dict[str, float] = defaultdict(float)
        self.bytes: dict[str, float] = defaultdict(float)
        self.began = time.perf_counter()
        self.cpu_began = time.process_time()
        self.others: dict[str, float] = {}

    def around(self, owner: object, name: str, part: str) -> None:
        """Replace the method or function `name` of `owner` by one that also adds its time to `part` of the step."""
        call = getattr(owner, name)

        def timed(*args, **kwargs):
            start = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.now[part] += time.perf_counter() - start

        setattr(owner, name, timed)

    def once(self, owner: object, name: str) -> None:
        """Replace the method or function `name` of `owner` by one that also keeps the seconds of its first call."""
        call = getattr(owner, name)

        def timed(*args, **kwargs):
            start = time.perf_counter()
            result = call(*args, **kwargs)
            self.others.setdefault(name, time.perf_counter() - start)
            return result

        setattr(owner, name, timed)

    def step_ends(self) -> None:
        now = time.perf_counter()
        self.now["the rest"] = now - self.began - sum(self.now.values())
        self.now["a step"] = now - self.began
        self.now["a step, processor time"] = time.process_time() - self.cpu_began
        for part, seconds in self.now.items():
            self.parts[part].append(seconds)
        self.now.clear()
        self.begin()

    def begin(self) -> None:
        self.began = time.perf_counter()
        self.cpu_began = time.process_time()

    def written(self, folder: Path) -> dict:
        counted = {part: values[2:-2] for part, values in self.parts.items()}  # the last steps save a checkpoint
        sizes = [path.stat().st_size for path in (folder / "checkpoints").glob("step_*/*")]
        steps = len(self.parts["a step"])
        return self.others | {
            "parts": {part: float(np.percentile(values, FASTEST)) for part, values in counted.items()},
            "bytes": {name: size / steps for name, size in self.bytes.items()},
            "checkpoint": sum(sizes) / len(list((folder / "checkpoints").glob("step_*"))) / 1e6,
        }


def train_with_clocks(out: Path, arguments: list[str]) -> None:
    """Run main() of scripts/train_detr.py in this process, with clocks. The process of rank 0 writes the measurements
    to `out`."""
    import train_detr

    from toolkit.run import loop, training_window, validation
    from toolkit.run.command_line import run_script
    from toolkit.run.session import Session

    clocks = Clocks()
    make = Session.training

    def with_clocks(*args):
        t = make(*args)
        clocks.around(t.model, "forward", "forward")
        clocks.around(t.detector, "criterion", "criterion")
        clocks.around(t.accelerator, "backward", "backward")
        clocks.around(training_window, "gradient_norm", "gradient norm")
        clocks.around(training_window, "reduce_dict", "what the step must know")
        clocks.around(t.guard, "snapshot", "guard")
        clocks.around(t.guard, "accepts", "guard")
        clocks.around(t.optimizer, "step", "optimizer")
        clocks.around(loop, "note_step", "meters and rows")
        clocks.around(t.ema, "update", "averaged weights")
        clocks.others["parameters"] = sum(parameter.numel() for parameter in t.trained_parameters)
        _count_bytes(t, clocks)
        _wait_for_data(t, clocks)
        _end_of_step(loop, clocks)
        return t

    Session.training = with_clocks
    for module, name in ((loop, "save"), (validation, "save"), (validation, "evaluate")):
        clocks.once(module, name)

    def main(config):
        train_detr.main(config)
        if int(os.environ.get("RANK", 0)) == 0:
            out.write_text(json.dumps(clocks.written(Path(config.run.output_dir) / config.run.name)))

    sys.exit(run_script(main, train_detr.Config, train_detr.DEFAULT_CONFIG, arguments))


def _wait_for_data(t, clocks: Clocks) -> None:
    windows = t.windows

    def timed():
        clocks.begin()
        start = time.perf_counter()
        for window in windows():
            clocks.now["wait for data"] += time.perf_counter() - start
            yield window
            start = time.perf_counter()

    t.windows = timed


def _end_of_step(loop, clocks: Clocks) -> None:
    after = loop.save_and_evaluate_when_due

    def timed(t, window):
        clocks.step_ends()
        after(t, window)
        clocks.begin()

    loop.save_and_evaluate_when_due = timed


def _count_bytes(t, clocks: Clocks) -> None:
    """Count the bytes that one process hands to each kind of collective: gradients by DDP, the rest by
    torch.distributed."""
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    if not dist.is_initialized():
        return

    reduce = dist.all_reduce
    of_gradients = []

    def hook(state, bucket):
        of_gradients.append(bucket)  # the hook calls all_reduce too
        future = allreduce_hook(state, bucket)
        of_gradients.clear()
        return future

    def counted(tensor, *args, **kwargs):
        name = "gradients" if of_gradients else "what the step must know"
        clocks.bytes[name] += tensor.numel() * tensor.element_size()
        return reduce(tensor, *args, **kwargs)

    t.model.register_comm_hook(None, hook)

    dist.all_reduce = counted


def main() -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    if DRIVEN in sys.argv[1:2]:  # one process of a measured run
        train_with_clocks(Path(sys.argv[2]), sys.argv[3:])
        return
    from benchmark import markdown

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=ShortUsage)
    parser.add_argument("--processes", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps that are counted (default 40)")
    arguments, options = parser.parse_known_args()  # the others go to scripts/train_detr.py
    print(markdown(bench_scaling(arguments.processes, arguments.steps, options)))


if __name__ == "__main__":
    main()
