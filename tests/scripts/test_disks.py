"""A disk that is full, out of inodes, gone or read-only, at any moment: a sentence, exit 2, what was saved stays."""

import subprocess
from pathlib import Path

import pytest
from launching import assert_same_run

from toolkit.runs.checkpoint import newest_valid

# Moment -> (function, its call). Steps 1 to 6, evaluated at 2, 4 and 6, saved at 3 and 6.
MOMENTS = {
    "start": ("toolkit.session:prepare_run_folder", 1),
    "settings": ("toolkit.session:save_config", 1),
    "row": ("toolkit.runs.metrics_log:MetricsLog.write", 2),
    "pictures": ("toolkit.validation:_show", 1),
    "predictions": ("toolkit.validation:_keep_predictions", 1),
    "first checkpoint": ("toolkit.runs.checkpoint:_seal", 1),
    "later checkpoint": ("toolkit.runs.checkpoint:_storable", 4),
    "final": ("toolkit.session:_write_final", 1),
    "report": ("toolkit.session:report_and_card", 1),
    "end": ("toolkit.log:Log.close", 1),
}


@pytest.fixture
def disk(tmp_path):
    """A small file system of its own."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=512m,nr_inodes=400", "none", str(place)]
    try:
        mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        pytest.skip(f"no mount: {error}")
    if mounted.returncode:
        pytest.skip(f"mounting a file system is not allowed here: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def make_room(disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    for path in disk.glob(".filler*"):
        path.unlink()


CASES = [pytest.param(how, moment, marks=[pytest.mark.slow] * ((how, moment) not in {("full", "first checkpoint")}))
         for how in ("full", "inodes", "removed", "read-only") for moment in MOMENTS
         if how != "read-only" or moment == "start"]  # fmt: skip


@pytest.mark.parametrize(("how", "moment"), CASES)
def test_the_run_ends_with_a_sentence_and_goes_on_when_there_is_room(server, script, resumable, disk, how, moment):
    args, reference = resumable(1)
    args = [*args, "--run.output_dir", str(disk), "--run.name", "run", "--eval.pictures", "2", "--data.workers", "0"]
    at, call = MOMENTS[moment]
    fault = {"disk": how, "folder": str(disk / "run" if how == "removed" else disk), "at": at, "call": call}
    ended = server.run(script, args, faults=[fault], whole=moment == "report")
    assert "Traceback" not in ended.text, ended.text
    if ended.code == 0:  # what a training can do without, or nothing was left to write
        assert how != "removed" and moment in ("pictures", "predictions", "report", "end"), ended.text
        assert "failed, and the run goes on without" in ended.text or moment == "end"
        assert ended.status["state"] == "done"
    else:
        assert ended.code == 2, ended.text
        (said,) = (line for line in ended.text.splitlines() if line.startswith("error: "))
        assert any(word in said for word in ("No space left", "no space", "removed", "No such file", "Read-only")), said
        if (disk / "run" / "status.json").exists() and (disk / "run" / "status.json").stat().st_size:
            assert ended.status["state"] == "bad_input" and ended.status["exit_code"] == 2
    newest, broken = newest_valid(disk / "run" / "checkpoints")
    assert broken == []
    if how != "removed" and moment in ("later checkpoint", "final", "report", "end"):
        assert newest is not None
    make_room(disk)
    again = server.run(script, args).ok()
    assert again.status["state"] == "done" and (again.folder / "final").is_dir()
    if how != "removed":  # the rows before are gone with the folder
        assert_same_run(again.folder, reference)

