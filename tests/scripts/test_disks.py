"""A disk that is full, out of inodes, gone or read-only, at any moment: a sentence, exit 2, what was saved stays."""

import shutil
import subprocess

import pytest
from launching import REPORT, ROOT, assert_same_run, small_settings

from toolkit.run.checkpoint import newest_valid

# Moment -> (function or audit event, its call). Steps 1 to 6, saved and then evaluated at 2, 4 and 6, saved at 3 too.
MOMENTS = {
    "start": ("os.mkdir */run", 1),
    "settings": ("open */.tmp-config.yaml*", 1),
    "row": ("toolkit.run.metrics_log:MetricsLog.write", 2),
    "pictures": ("open */pictures/step_*", 1),
    "predictions": ("open */.tmp-predictions.json*", 1),
    "first checkpoint": ("open */.tmp-step_*/MANIFEST.json", 1),
    "metric": ("toolkit.run.saving:replace_state", 1),  # of the evaluation of a checkpoint that stands
    "later checkpoint": ("safetensors.torch:save_file", 4),
    "final": ("os.mkdir */final", 1),
    "report": (REPORT, 1),
    "end": ("toolkit.run.log:Log.close", 1),
}
CASES = [("full", "first checkpoint"), *(pytest.param(how, moment, marks=pytest.mark.slow) for how, moments in {
    "full": MOMENTS.keys() - {"first checkpoint"},
    "inodes": ("start", "pictures", "first checkpoint", "metric", "final"),
    "removed": ("row", "metric", "later checkpoint", "final", "end"), "read-only": ("start",),
}.items() for moment in sorted(moments))]  # fmt: skip


@pytest.mark.slow
def test_a_run_and_data_that_are_read_only(server, script, settings, data, whole, tmp_path, mount):
    """What only reads them works; what writes to the run says so."""
    run = shutil.copytree(whole, tmp_path / "old", symlinks=True)
    pictures = shutil.copytree(data, tmp_path / "data")
    for folder in (run, pictures):
        mount(folder, "--bind", folder)
        mount(folder, "-o", "remount,bind,ro")
    assert server.run(ROOT / "scripts" / "evaluate.py", [run]).code == 0
    predicted = [run, pictures / "val", "--out", tmp_path / "found", "--format", "json"]
    assert server.run(ROOT / "scripts" / "predict.py", predicted).code == 0
    place = ["--run.output_dir", tmp_path, "--run.name"]
    trained = small_settings(script, pictures, [*place, "new", "--run.max_steps", 1])
    server.run(script, trained).ok()
    again = small_settings(script, data, [*place, "old", "--run.resume", "latest"])
    exported = [run, "--out", run / "new"]
    for program, args in (("report", [run]), ("export", exported), ("publish", [run]), (script.name, again)):
        ended = server.run(ROOT / "scripts" / f"{program}.py", args)
        assert ended.code == 2 and ended.text.count("error: ") == 1 and "Traceback" not in ended.text, ended.text
        assert "Read-only file system" in ended.text and str(run) in ended.text, ended.text


@pytest.mark.parametrize(("how", "moment"), CASES)
def test_the_run_ends_with_a_sentence_and_goes_on_when_there_is_room(
    server, script, resumable, mount, tmp_path, how, moment
):
    args, reference = resumable(1)
    disk = mount(tmp_path / "disk", "-t", "tmpfs", "-o", "size=512m,nr_inodes=400", "none")
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
