"""Killed at any of its writes and started again, every program ends with the same bytes: audit events count them.

    EVERY_WRITE=1 python -m pytest -m slow -s tests/scripts/test_every_write.py     # all writes, not a drawn few
"""

import hashlib
import os
import random
import re
import shutil
from pathlib import Path

import pytest
from launching import ROOT, SCRIPTS, Server, assert_same_run, small_settings

DRAWN = 4  # of a program
EVERY = bool(os.environ.get("EVERY_WRITE"))
PROGRAMS = {  # name -> arguments of a run, the data and a new folder
    "evaluate": lambda run, data, out: [run, "--save", out / "results.json"],
    "predict": lambda run, data, out: [run, data / "val", "--out", out, "--format", "json", "coco", "voc", "csv",
                                       "--score-threshold", 0.01, "--overwrite"],
    "report": lambda run, data, out: [run, "--out", out],
    "check_data": lambda run, data, out: [data / "annotations" / "val.json", "--image-dir", data / "val",
                                          "--json", out / "found.json", "--pictures", out / "pictures"],
}  # fmt: skip


def killed_at_writes(run, count: Path, seed: str):
    """Counts the writes of `run(faults)`, and yields after each of the kills that are drawn among them."""
    run([{"count_writes": str(count)}]).ok()
    writes = int(count.read_text())
    numbers = sorted(random.Random(seed).sample(range(1, writes + 1), writes if EVERY else DRAWN))
    for number in numbers:
        assert run([{"kill_at_write": number}]).codes == [-9], number
        yield number
    print(f"\n{seed}: {len(numbers)} kills at {writes} writes, all identical", flush=True)


def contents(folder: Path) -> dict[str, str]:
    """Digests of files, without what tells the time or the folder."""
    names = (re.escape(bytes(folder)), re.escape(folder.parent.name.encode()))
    passing = re.compile(b"|".join((rb"\d{4}-\d\d-\d\d[T ][\d:.+]*", rb"\d+\.\d+ s\b", *names)))
    files = sorted(path for path in folder.rglob("*") if path.is_file() and ".tmp" not in path.name)
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(passing.sub(b"", path.read_bytes())).hexdigest()
        for path in files
    }


@pytest.mark.slow
def test_training_killed_at_a_write_goes_on_to_the_same_bits(server: Server, data, tmp_path):
    """Steps, checkpoints, evaluations with pictures, the test split, final/ and the report."""
    args = small_settings(SCRIPTS[0], data, [
        "--run.output_dir", tmp_path, "--run.max_steps", 2, "--run.eval_every", 1, "--run.save_every", 1,
        "--run.resume", "latest", "--eval.pictures", 2, "--eval.test_split", data / "annotations" / "val.json",
    ])  # fmt: skip

    def run(name: str, faults=()):
        return server.run(SCRIPTS[0], [*args, "--run.name", name], faults=faults, whole=True)

    reference = run("reference").ok().folder
    number = 0

    def begin(faults):
        nonlocal number
        number += 1
        return run(f"killed{number}", faults)

    for write in killed_at_writes(begin, tmp_path / "count", "train_detr"):
        folder = run(f"killed{number}").ok().folder
        assert_same_run(folder, reference)
        for part in ("final", "test"):
            assert contents(folder / part) == contents(reference / part), (write, part)
        assert (folder / "report" / "index.html").is_file(), write


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_killed_at_a_write_ends_alike_when_started_again(server, data, whole, tmp_path, program):
    out, path = tmp_path / "out", ROOT / "scripts" / f"{program}.py"
    args = PROGRAMS[program](whole, data, out)

    def run(faults=()):
        return server.run(path, args, faults=faults)

    out.mkdir()
    run().ok()
    expected = contents(out)
    assert expected

    def begin(faults):
        shutil.rmtree(out)
        out.mkdir()
        return run(faults)

    for write in killed_at_writes(begin, tmp_path / "count", program):
        run().ok()
        assert contents(out) == expected, write
