"""The small inputs of the calls in `test_commands.py`."""

import shutil
from pathlib import Path

from calling import Call, call_all
from places import SMALL_CONFIGS, SUPPORT

from toolkit.tools.shapes import make_shapes

STUB = SUPPORT / "stub_training.py"
SWEEP = f"""program: {STUB}
method: random
metric: {{name: val/score, goal: maximize}}
parameters: {{optim.lr: {{min: 0.001, max: 0.1}}}}
"""
VAL = "data/annotations/val.json"
# By program: the arguments of a good call.
BASES = {
    "check_data": {"source": [VAL]},
    "choose": {"source": ["data"], "--minutes": ["1"], "--out": ["written"]},
    "convert": {"source": [VAL], "target": ["written"], "--to": ["coco"]},
    "evaluate": {"run": ["runs/run"]},
    "export": {"model": ["runs/run"], "--out": ["written"]},
    "find_batch_size": {"script": [str(STUB)], "--out": ["written.yaml"]},
    "find_rate": {"script": [str(STUB)], "--out": ["written.yaml"]},
    "predict": {"model": ["runs/run"], "images": ["data/val/000000.jpg"], "--out": ["written"]},
    "publish": {"run": ["runs/run"]},
    "replay": {"folder": ["runs/run/nan/step_000001/rank0"]},
    "report": {"sources": ["runs/run"]},
    "sweep": {"sweep": ["sweep.yaml"], "--out": ["written"], "--trials": ["1"]},
    "benchmark": {"--only": ["table"], "--quick": []},
    "toolkit.tools.anchors": {"--annotations": [VAL], "--per-level": ["1"]},
}


def make_inputs(folder: Path) -> None:
    """Fill a folder with a data set, a finished run on it, a file and a folder of something else, and a sweep."""
    make_shapes(folder / "data", train_images=4, val_images=4, image_size=64)
    (folder / "a_folder").mkdir()
    (folder / "a_file.txt").write_text("a text\n")
    (folder / "sweep.yaml").write_text(SWEEP)
    call = Call("train_ssd", (*training_argv("--run.name", "run", "--run.output_dir", "made"),))
    (trained,) = call_all([call], folder, keep_what_is_made)
    assert trained.code == 0, trained
    shutil.move(folder / "made", folder / "runs")


def keep_what_is_made() -> None:
    """Make the folder of runs before the call, which is then not removed after it."""
    Path("made").mkdir()


def training_argv(*settings: str) -> tuple[str, ...]:
    """Return the arguments of a small training of SSD in the folder of the inputs; those of `settings` win."""
    common = {
        "--config": str(SMALL_CONFIGS / "train_ssd.yaml"),
        "--data.train": "data/annotations/train.json",
        "--data.val": VAL,
        "--data.format": "coco",
        "--data.image_size": "64",
        "--data.workers": "0",
        "--data.batch_size_per_device": "2",
        "--run.log_every": "1",
        "--run.max_steps": "1",
        "--run.max_minutes": "null",
        "--eval.batch_size_per_device": "2",
        "--eval.pictures": "0",
        "--run.output_dir": "started",
    }
    given = set(settings[::2])
    kept = [word for pair in common.items() if pair[0] not in given for word in pair]
    return (*kept, *settings)


def replace_what_takes_long() -> None:
    """Let calls end where the work begins that takes long and that no argument is checked in."""
    import benchmark
    import export
    import find_batch_size
    import find_rate
    import sweep

    from toolkit.tools.sweeps import candidates, choice

    bench = lambda **_: [{"name": "nothing", "value": 1.0, "unit": "s"}]  # noqa: E731
    benchmark.BENCHES = tuple((name, bench, {}) for name, *_ in benchmark.BENCHES)
    export.write_and_check = _done
    find_batch_size.obstacle = lambda *_: ""
    find_rate.WatchedRun = _done
    sweep.run_trial = _done
    groups = {"model": {"architecture": "ssd"}, "eval": {"metric_for_best": "bbox_AP"}}
    candidates.resolved_settings = lambda *_: groups
    choice.run_rounds = _done


def stop_before_the_first_step() -> None:
    """Let trainings end when everything is checked and built."""
    from toolkit.run import session

    build = session.Session.training

    def build_and_stop(*arguments):
        build(*arguments)
        raise SystemExit(0)

    session.Session.training = build_and_stop


def _done(*_):
    raise SystemExit(0)
