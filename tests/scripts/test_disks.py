"""A disk that is full, out of inodes, gone or read-only, at any moment: a sentence, exit 2, what was saved stays."""

import subprocess

import pytest
from launching import REPORT, assert_same_run

from toolkit.runs.checkpoint import newest_valid

# Moment -> (function or audit event, its call). Steps 1 to 6, evaluated at 2, 4 and 6, saved at 3 and 6.
MOMENTS = {
    "start": ("os.mkdir */run", 1),
    "settings": ("open */.tmp-config.yaml*", 1),
    "row": ("toolkit.runs.metrics_log:MetricsLog.write", 2),
    "pictures": ("open */pictures/step_*", 1),
    "predictions": ("open */.tmp-predictions.json*", 1),
    "first checkpoint": ("open */.tmp-step_*/MANIFEST.json", 1),
    "later checkpoint": ("safetensors.torch:save_file", 4),
    "final": ("os.mkdir */final", 1),
    "report": (REPORT, 1),
    "end": ("toolkit.log:Log.close", 1),
}
CASES = [("full", "first checkpoint"), *(pytest.param(how, moment, marks=pytest.mark.slow) for how, moments in {
    "full": MOMENTS.keys() - {"first checkpoint"},
    "inodes": ("start", "pictures", "first checkpoint", "final"),
    "removed": ("row", "later checkpoint", "final", "end"), "read-only": ("start",),
}.items() for moment in sorted(moments))]  # fmt: skip


@pytest.mark.parametrize(("how", "moment"), CASES)
def test_the_run_ends_with_a_sentence_and_goes_on_when_there_is_room(server, script, resumable, mount, how, moment):
    (args, reference), disk = resumable(1), mount("size=512m,nr_inodes=400")
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
        (error,) = (line for line in ended.text.splitlines() if line.startswith("error: "))
        reasons = ("No space left", "no space", "removed", "No such file", "Read-only")
        assert any(reason in error for reason in reasons), error
        if (disk / "run" / "status.json").exists() and (disk / "run" / "status.json").stat().st_size:
            assert ended.status["state"] == "bad_input" and ended.status["exit_code"] == 2
    newest, broken = newest_valid(disk / "run" / "checkpoints")
    assert broken == []
    assert newest is not None or how == "removed" or moment not in ("later checkpoint", "final", "report", "end")
    subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    for path in disk.glob(".filler*"):
        path.unlink()
    again = server.run(script, args).ok()
    assert again.status["state"] == "done" and (again.folder / "final").is_dir()
    if how != "removed":  # the rows before are gone with the folder
        assert_same_run(again.folder, reference)
