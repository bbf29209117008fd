"""What a step and an evaluation of a training script would cost on a GPU, on a machine without one.

    python tests/scripts/pretended_run.py train_detr [--run.precision fp16 ...]     # one run, with the places
    python tests/scripts/pretended_run.py CASES.json    # [[script, [flags], faults?], ...]; a line of JSON for each
    python tests/scripts/pretended_run.py CASES.json --step    # only the step is counted, and the run is left then

The script runs as it is on a pretended device (`pretended_device.py`). Counted are its second optimizer step, which is
a steady one (the third with several processes), and its last pass over the validation data.
"""

import importlib.util
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import pretended_device
import torch
from torch.distributed.utils import _to_kwargs

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]
PHASES = ("forward", "backward", "update")  # of a step; the criterion is in the first


class Counted(Exception):
    """Raised inside a run of which only the step is counted."""


class Counting:
    """Events of the second step, by the part of the step they are in, and of the last pass over the validation data."""

    def __init__(self, log: pretended_device.Log, only_step: bool = False):
        from toolkit.run import training, training_window, validation
        from toolkit.run.session import Session

        self.only_step = only_step
        self.make_training = Session.training
        self.log, self.step, self.counted, self.passed = log, [], [], []
        self.windows = training.Training.windows
        self.backward = training_window.TrainingWindow.backward
        self.phase = PHASES[0]
        training_window.TrainingWindow.backward = self._backward()
        self.predict = validation.predict_dataset
        training.Training.windows, validation.predict_dataset = self._windows(), self._predict

    def _windows(self):
        def windows(t):
            steady = 1 if t.accelerator.num_processes == 1 else 2  # DDP orders its buckets anew before the second
            for number, window in enumerate(self.windows(t)):
                self._begin_phase(PHASES[0])
                self.step = []
                self.log.recording = number == steady
                try:
                    yield window
                finally:
                    self._begin_phase(PHASES[0])
                    if self.log.recording:
                        self.counted = self.step
                    self.log.recording = False
                if number == steady and self.only_step and t.accelerator.is_main_process:
                    raise Counted  # which ends the other processes too

        return windows

    def _backward(self):
        def backward(window, *given):
            self._begin_phase("backward")
            self.backward(window, *given)
            self._begin_phase("update")

        return backward

    def _begin_phase(self, phase: str) -> None:
        """What has happened since the last call was in the phase before."""
        self.step += [(self.phase, event) for event in self.log.events]
        self.log.events = []
        self.phase = phase

    def _predict(self, *args, **kwargs):
        before = self.log.recording, self.log.events
        self.log.events, self.log.recording = [], True
        try:
            return self.predict(*args, **kwargs)
        finally:
            self.passed = self.log.events
            self.log.recording, self.log.events = before

    def found(self) -> dict:
        launches = Counter(phase for phase, event in self.counted if event.kind == "launch")
        step = _summary([event for _, event in self.counted])
        return {"step": step | {"phases": dict(launches)}, "evaluation": _summary(self.passed)}


def _summary(events: list) -> dict:
    waits = [event for event in events if event.kind == "wait"]
    places = Counter(f"{e.op} {e.place}" + f" [{e.library}]" * bool(e.library) for e in waits)
    unpinned = Counter(e.place for e in events if e.kind == "copy" and not e.pinned)
    launches = Counter(e.place for e in events if e.kind == "launch")
    return {
        "waits": len(waits),
        "places": dict(places.most_common()),
        "unpinned": dict(unpinned.most_common()),
        "launches": sum(launches.values()),
        "launches_at": dict(launches.most_common(30)),
    }


class AsDistributed(torch.nn.Module):
    """What DistributedDataParallel does on a GPU to the inputs of `forward`, and gloo never does."""

    def __init__(self, module: torch.nn.Module):
        super().__init__()
        self.module = module

    def forward(self, *inputs, **named):
        moved, moved_named = _to_kwargs(inputs, named, pretended_device.DEVICE, False)
        return self.module(*moved[0], **moved_named[0])


def moving_its_inputs(make_training):
    """`Session.training` with a model that moves its inputs, as on several GPUs."""

    def training(*given):
        t = make_training(*given)
        if t.accelerator.num_processes == 1:
            t.model = AsDistributed(t.model)
        return t

    return training


def run(script: str, args: list[str], counting: Counting) -> dict:
    """One run; `code` is its exit code, `step` and `evaluation` are what was counted."""
    from toolkit.run import command_line
    from toolkit.run.session import Session

    spec = importlib.util.spec_from_file_location("script", ROOT / "scripts" / f"{script}.py")
    module = sys.modules["script"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    Session.training = moving_its_inputs(counting.make_training)
    counting.counted, counting.passed, began = [], [], time.monotonic()
    try:
        code = command_line.run_script(module.main, module.Config, module.DEFAULT_CONFIG, args)
    except Counted:
        code = 0
    return {"code": code, "seconds": time.monotonic() - began, **counting.found()}


def main(argv: list[str]) -> int:
    import faults

    torch.set_num_threads(1)
    counting = Counting(pretended_device.install(ROOT), only_step="--step" in argv)
    if argv[0].endswith(".json"):
        for script, args, *of_it in json.loads(Path(argv[0]).read_text()):
            for planted in of_it:  # they stay: of the last case only
                faults.install(planted, rank=0)
            print("\nFOUND " + json.dumps(run(script, args, counting)), flush=True)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        short = [
            "--run.name",
            "pretended",
            "--run.max_steps",
            "3",
            "--run.max_minutes",
            "null",
            "--run.eval_every",
            "0",
            "--run.save_every",
            "0",
            "--data.workers",
            "0",
            "--run.output_dir",
            folder,
        ]
        found = run(argv[0], [*argv[1:], *short], counting)
    for part in ("step", "evaluation"):
        print(f"\n{part}: {found[part]['waits']} waits, {found[part]['launches']} launches")
        if part == "step":
            print("launches of its phases:", found[part]["phases"])
        for kind in ("places", "unpinned", "launches_at"):
            for at, count in found[part][kind].items():
                print(f"{count:7d} {kind.removesuffix('_at')} at {at}")
    return found["code"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
