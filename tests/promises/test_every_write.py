"""Killed at any of its writes, or requests to the hub, and started again, every program ends with the same bytes.

WRITES=25 WRITE_SEED=7 python -m pytest -m slow -s tests/promises/test_every_write.py     # so many of each program
"""

import hashlib
import json
import os
import random
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import zip_longest
from pathlib import Path

import pytest
from launching import SCRIPTS, Result, assert_same_run, small_settings
from local_hub import local_hub
from places import ROOT, SUPPORT

DRAWN = int(os.environ.get("WRITES", 2))  # of a program
SEED = os.environ.get("WRITE_SEED", "0")
EVENTS = ("write *", "socket.connect *")
NOT_COMPARED = (".tmp*", "study.db*", "locks/*", "logs/*")  # of a sweep: its data base, and what is longer after a kill
PASSING = re.compile(rb"\d{4}-\d\d-\d\d[T ][\d:.+]*|\d+\.\d+ s\b")
STUB = SUPPORT / "stub_training.py"
RATE = {"distribution": "log_uniform_values", "min": 1e-4, "max": 1.0}
SWEEP = {
    "program": str(STUB),
    "method": "bayes",
    "metric": {"name": "val/score", "goal": "maximize"},
    "parameters": {"optim.lr": RATE},
}
PROGRAMS = {  # and their arguments
    "evaluate": "{run} --save {out}/results.json",
    "predict": "{run} {data}/val --out {out}/found --format json coco voc csv --score-threshold 0.01 --overwrite",
    "report": "{run} --out {out}/report",
    "check_data": "{data}/annotations/val.json --image-dir {data}/val --json {out}/found.json --pictures {out}/seen",
    "publish": "{run} --hub.push me/cups",
    "find_rate": "{stub} --out {out}/rate.yaml --steps 30",
    "sweep": "{sweep} --out {out}/sweep --trials 2",
}


@pytest.fixture
def hub(server):
    """(`run(script, args, faults)` with a hub of its own, the files that were committed there by name)"""
    with local_hub() as (hub, constants, env):
        to_hub = [{"set": f"huggingface_hub.constants:{name}", "to": value} for name, value in constants.items()]

        def run(script, args, faults=(), **options):
            return server.run(script, args, faults=[*to_hub, *faults], env=env, **options)

        yield run, hub.files


def kills(run: Callable[[list[dict]], Result], folder: Path, name: str) -> Iterator[dict]:
    """Faults that kill `run(faults)`: at writes of each folder, and requests, in turn and in a drawn order."""
    lists = {at: folder / at.partition(" ")[0] for at in EVENTS}
    run([{"list": str(path), "at": at} for at, path in lists.items()]).ok()
    kinds = defaultdict(list)
    for at, path in lists.items():
        for number, line in enumerate(path.read_text().splitlines(), 1):
            kind = re.sub(r"\d|\.tmp.*", "", str(Path(line).parent))
            kinds[at, kind].append((at, number, line))
    draw = random.Random(f"{SEED} {name}")
    for kind in kinds.values():
        draw.shuffle(kind)
    events = [event for turn in zip_longest(*kinds.values()) for event in turn if event is not None]
    for at, number, line in events[:DRAWN]:
        print(f"{name}: killed before {at.split()[0]} {number} {line}", flush=True)
        yield {"signal": "SIGKILL", "at": at, "call": number}
    print(f"{name}: killed at {len(events[:DRAWN])} of {len(events)} events of {len(kinds)} kinds", flush=True)


def contents(folder: Path) -> dict[str, str]:
    """Digests of files, without what tells the time."""
    digests = {}
    for path in folder.rglob("*"):
        if path.is_file() and not any(path.match(pattern) for pattern in NOT_COMPARED):
            lasting = PASSING.sub(b"", path.read_bytes())
            digests[path.relative_to(folder).as_posix()] = hashlib.sha256(lasting).hexdigest()
    return digests


@pytest.mark.slow
def test_training_killed_at_a_write_goes_on_to_the_same_bits(hub, data, tmp_path):
    """Steps, checkpoints, evaluations with pictures, the test split, exported files, final/, the report, the hub."""
    run_there, uploaded = hub
    folder = tmp_path / "run"
    reference = tmp_path / "reference"
    ssd = SCRIPTS[-1]
    saved = f"--run.output_dir {tmp_path} --run.max_steps 2 --run.eval_every 1 --run.save_every 1 --run.resume latest"
    more = f"--eval.pictures 2 --eval.test_split {data}/annotations/val.json --run.export true --hub.push me/cups"
    args = small_settings(ssd, data, f"{saved} {more}")

    def begin(faults):
        shutil.rmtree(folder, ignore_errors=True)
        uploaded.clear()
        return run_there(ssd, args, faults, whole=True)

    begin([]).ok()
    folder.rename(reference)
    for fault in kills(begin, tmp_path, "train_ssd"):
        begin([fault]).killed()
        run_there(ssd, args, whole=True).ok()
        assert_same_run(folder, reference)
        assert contents(folder / "final") == contents(reference / "final")
        assert contents(folder / "test") == contents(reference / "test")
        assert (folder / "report" / "index.html").is_file()
        assert uploaded == {path.name: path.read_bytes() for path in (folder / "final").glob("[!.]*")}


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_program_killed_at_a_write_ends_alike_when_started_again(hub, data, whole, tmp_path, program):
    """Killed twice, the second time where it has gone on from the first."""
    run_there, uploaded = hub
    out = tmp_path / "out"
    sweep = tmp_path / "sweep.yaml"
    sweep.write_text(json.dumps(SWEEP))
    args = PROGRAMS[program].format(run=out / "run", data=data, out=out, stub=STUB, sweep=sweep)
    scratch = {"set": "tempfile:tempdir", "to": str(tmp_path)}

    def run(faults=()):
        return run_there(ROOT / "scripts" / f"{program}.py", args, [scratch, *faults])

    def begin(faults):
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(whole, out / "run", symlinks=True)
        uploaded.clear()
        return run(faults)

    begin([]).ok()
    expected = contents(out)
    published = dict(uploaded)
    assert published or len(expected) > len(contents(whole))
    for fault in kills(begin, tmp_path, program):
        begin([fault]).killed()
        run([fault])
        run().ok()
        assert contents(out) == expected
        assert uploaded == published
