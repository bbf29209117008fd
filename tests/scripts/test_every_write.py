"""Killed at any of its writes, or requests to the hub, and started again, every program ends with the same bytes.

    WRITES=25 WRITE_SEED=7 python -m pytest -m slow -s tests/scripts/test_every_write.py     # so many of each program
"""

import hashlib
import json
import os
import random
import re
import shutil
from collections import defaultdict
from itertools import zip_longest
from pathlib import Path

import pytest
from launching import ROOT, SCRIPTS, Server, assert_same_run, small_settings
from local_hub import local_hub
from places import SUPPORT

DRAWN = int(os.environ.get("WRITES", 4))  # of a program
SEED = os.environ.get("WRITE_SEED", "0")
EVENTS = ("write *", "socket.connect *")
NOT_COMPARED = (".tmp*", "study.db*", "locks/*", "logs/*")  # of a sweep: its data base, and what is longer after a kill
STUB = SUPPORT / "stub_training.py"
SWEEP = {
    "program": str(STUB), "method": "bayes", "metric": {"name": "val/score", "goal": "maximize"},
    "parameters": {"optim.lr": {"distribution": "log_uniform_values", "min": 1e-4, "max": 1.0}},
}  # fmt: skip


def sweep(run: Path, data: Path, out: Path) -> list:
    out.with_name("sweep.yaml").write_text(json.dumps(SWEEP))
    return [out.with_name("sweep.yaml"), "--out", out, "--trials", 2]


PROGRAMS = {  # name -> arguments of a run, the data and a new folder
    "evaluate": lambda run, data, out: [run, "--save", out / "results.json"],
    "predict": lambda run, data, out: [run, data / "val", "--out", out, "--format", "json", "coco", "voc", "csv",
                                       "--score-threshold", 0.01, "--overwrite"],
    "report": lambda run, data, out: [run, "--out", out],
    "check_data": lambda run, data, out: [data / "annotations" / "val.json", "--image-dir", data / "val",
                                          "--json", out / "found.json", "--pictures", out / "pictures"],
    "publish": lambda run, data, out: [shutil.copytree(run, out / "run", symlinks=True), "--hub.push", "me/cups"],
    "find_rate": lambda run, data, out: [STUB, "--out", out / "rate.yaml", "--steps", 30],
    "sweep": sweep,
}  # fmt: skip


@pytest.fixture
def hub(server: Server):
    """(run, files): `server.run` with a hub of its own, and what was committed there."""
    with local_hub() as (hub, constants, env):
        to_hub = [{"set": f"huggingface_hub.constants:{name}", "to": value} for name, value in constants.items()]

        def run(script, args, faults=(), **options):
            return server.run(script, args, faults=[*to_hub, *faults], env=env, **options)

        yield run, hub.files


def kills(run, folder: Path, name: str):
    """Faults that kill `run(faults)`: at writes of each folder, and requests, in turn and in a drawn order."""
    lists = {at: folder / at.partition(" ")[0] for at in EVENTS}
    run([{"list": str(path), "at": at} for at, path in lists.items()]).ok()
    kinds, draw = defaultdict(list), random.Random(f"{SEED} {name}")
    for at, path in lists.items():
        for number, line in enumerate(path.read_text().splitlines(), 1):
            kinds[at, re.sub(r"\d|\.tmp.*", "", str(Path(line).parent))].append((at, number, line))
    for kind in kinds.values():
        draw.shuffle(kind)
    events = [event for turn in zip_longest(*kinds.values()) for event in turn if event is not None]
    for at, number, line in events[:DRAWN]:
        print(f"{name}: killed before {at.split()[0]} {number} {line}", flush=True)
        yield {"signal": "SIGKILL", "at": at, "call": number}
    print(f"{name}: killed at {len(events[:DRAWN])} of {len(events)} events of {len(kinds)} kinds", flush=True)


def contents(folder: Path) -> dict[str, str]:
    """Digests of files, without what tells the time."""
    passing = re.compile(rb"\d{4}-\d\d-\d\d[T ][\d:.+]*|\d+\.\d+ s\b")
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not any(map(path.match, NOT_COMPARED)))
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(passing.sub(b"", path.read_bytes())).hexdigest()
        for path in files
    }


@pytest.mark.slow
def test_training_killed_at_a_write_goes_on_to_the_same_bits(hub, data, tmp_path):
    """Steps, checkpoints, evaluations with pictures, the test split, exported files, final/, the report, the hub."""
    run_there, uploaded = hub
    folder, reference = tmp_path / "run", tmp_path / "reference"
    args = small_settings(SCRIPTS[-1], data, [
        "--run.output_dir", tmp_path, "--run.max_steps", 2, "--run.eval_every", 1, "--run.save_every", 1,
        "--run.resume", "latest", "--eval.pictures", 2, "--eval.test_split", data / "annotations" / "val.json",
        "--run.export", "true", "--hub.push", "me/cups",
    ])  # fmt: skip

    def run(faults=()):
        return run_there(SCRIPTS[-1], args, faults, whole=True)

    def begin(faults):
        shutil.rmtree(folder, ignore_errors=True)
        uploaded.clear()
        return run(faults)

    begin([]).ok()
    folder.rename(reference)
    for fault in kills(begin, tmp_path, "train_ssd"):
        assert begin([fault]).codes == [-9]
        run().ok()
        assert_same_run(folder, reference)
        for part in ("final", "test"):
            assert contents(folder / part) == contents(reference / part), part
        assert (folder / "report" / "index.html").is_file()
        assert uploaded == {path.name: path.read_bytes() for path in (folder / "final").glob("[!.]*")}


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_killed_at_a_write_ends_alike_when_started_again(hub, data, whole, tmp_path, program):
    """Twice, the second time where it has gone on from the first."""
    (run_there, uploaded), out, killed, args = hub, tmp_path / "out", 0, []

    scratch = {"set": "tempfile:tempdir", "to": str(tmp_path)}

    def run(faults=()):
        return run_there(ROOT / "scripts" / f"{program}.py", args, [scratch, *faults])

    def begin(faults):
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        uploaded.clear()
        args[:] = PROGRAMS[program](whole, data, out)
        return run(faults)

    begin([]).ok()
    expected = contents(out), dict(uploaded)
    assert expected[0]
    for fault in kills(begin, tmp_path, program):
        assert begin([fault]).codes == [-9]
        killed += 1 + (run([fault]).codes == [-9])
        run().ok()
        assert (contents(out), uploaded) == expected
    print(f"{program}: {killed} kills, all identical", flush=True)
