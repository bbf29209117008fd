"""A newest checkpoint that is sealed and wrong: passed over, or the guard stops; nothing saved is ever not finite."""

import hashlib
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from launching import nonfinite
from safetensors.torch import load_file, save_file

FILES = {"weight": ("model", "weight"), "average": ("ema", "weight"), "running variance": ("model", "running_var")}
CASES = [("weight", math.nan), ("running variance", 1e38), ("moment", math.inf), *(
    pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("weight", 1e38), ("average", -math.inf), ("average", 1e38), ("running variance", math.nan), ("moment", 1e38)
    ))]  # fmt: skip


def seal(path: Path) -> None:
    """The manifest says that the files are what was written."""
    manifest = json.loads((path / "MANIFEST.json").read_text())
    for name, entry in manifest["files"].items():
        data = (path / name).read_bytes()
        entry |= {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (path / "MANIFEST.json").write_text(json.dumps(manifest))


def doctor(path: Path, what: str, value: float) -> None:
    if what == "moment":
        optimizer = torch.load(path / "optimizer.pt", weights_only=True)
        moments = [m for state in optimizer["state"].values() for m in state.values() if torch.as_tensor(m).dim() > 1]
        moments[0][(0,) * moments[0].dim()] = value
        torch.save(optimizer, path / "optimizer.pt")
    else:
        stem, ending = FILES[what]
        tensors = load_file(path / f"{stem}.safetensors")
        next(t for n, t in tensors.items() if n.endswith(ending) and t.is_floating_point()).view(-1)[0] = value
        save_file(tensors, path / f"{stem}.safetensors")
    seal(path)


@pytest.fixture
def doctored(resumable, tmp_path):
    """(arguments that go on to two more steps, copy of a finished run, the newest of its two checkpoints)"""
    args, reference = resumable(1)
    folder = shutil.copytree(reference, tmp_path / "copy", symlinks=True)
    newest = (folder / "checkpoints" / "latest").resolve()
    (folder / "checkpoints" / "best").unlink()  # whichever it was, it would be fallen back to
    for path in set(folder.glob("checkpoints/step_*")) - {newest}:
        shutil.rmtree(path)
    earlier = shutil.copytree(newest, newest.with_name("step_000001"))
    for name, changes in (("state.json", {}), ("MANIFEST.json", {"sequence": 0})):
        content = json.loads((earlier / name).read_text())
        (earlier / name).write_text(json.dumps(content | {"step": 1} | changes))
    seal(earlier)
    args = [*args, "--run.output_dir", str(tmp_path), "--run.name", "copy", "--run.resume_schedule", "new",
            "--run.max_steps", "8", "--run.epochs", "9", "--run.keep", "9"]  # fmt: skip
    return args, folder, newest


@pytest.mark.parametrize(("what", "value"), CASES)
def test_a_number_that_spoils_everything(server, script, doctored, what, value):
    args, folder, newest = doctored
    doctor(newest, what, value)
    ended = server.run(script, args)
    assert ended.code in (0, 3) and "Traceback" not in ended.text, ended.text
    passed_over = f"Passed over Checkpoint {newest}" in ended.text
    assert passed_over == (not math.isfinite(value)), ended.text
    if passed_over:
        assert ended.code == 0 and "NaN or infinity in " in ended.text and "step_000001 (step 1)" in ended.text
    saved = [path for path in folder.glob("checkpoints/step_*") if path != newest or not passed_over]
    assert saved and all(nonfinite(path) == [] for path in saved)
    assert (ended.status["state"], ended.status["exit_code"]) in (("done", 0), ("stopped_by_guard", 3))
    for path in folder.glob("final/*.safetensors") if ended.code == 0 else ():
        assert all(t.isfinite().all() for t in load_file(path).values() if t.is_floating_point())
