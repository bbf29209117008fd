"""The notebooks as stored, and run from their first to their last cell with small settings.

`tests/store_notebooks.py` stores what their cells show.
"""

import ast
import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager
from store_notebooks import LARGEST_BYTES, NOTEBOOKS, ROOT, client, environment, faults, storable

from toolkit.base.errors import BadInput
from toolkit.tools.notebook import import_changed
from toolkit.tools.shapes import make_shapes

DETR = ["--model.d_model", 32, "--model.heads", 2, "--model.ffn_dim", 32, "--model.decoder_layers", 2,
        "--model.num_queries", 20]  # fmt: skip
SSD = ["--model.backbone", "test_resnet", "--model.strides", "[8, 16, -1]", "--model.channels", "[32, 32, 32]",
       "--model.aspect_ratios", "[[2.0], [2.0], [2.0]]"]  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "shapes"
    make_shapes(folder, train_images=8, val_images=4, image_size=64)
    return folder / "annotations"


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    command = [sys.executable, ROOT / "scripts" / "train_detr.py", *small(data, "base"), "--run.output_dir", folder]
    subprocess.run([str(word) for word in [*command, *DETR]], check=True, env=environment(folder))
    return folder / "base"


def small(data: Path, name: str) -> list:
    return [
        "--run.name", name, "--run.max_steps", 4, "--run.max_minutes", "null", "--run.log_every", 1,
        "--run.eval_every", 2, "--data.train", data / "train.json", "--data.val", data / "val.json", "--data.format",
        "coco", "--data.image_size", 64, "--data.workers", 0, "--data.batch_size_per_device", 2,
    ]  # fmt: skip


def parameters(stem: str, data: Path, trained: Path | None) -> dict:
    coco = small(data, "small")
    some, every = [*coco, *DETR], coco[2:]  # the second without a name
    own_data = ["--data.image_size", 64, "--data.workers", 0, "--data.batch_size_per_device", 2]
    short = ["--run.name", "small", "--run.max_steps", 4, "--run.max_minutes", "null", "--run.log_every", 1]
    given = {
        "01_train_detr": {"settings": some},
        "02_your_data": {"folder": None, "settings": [*short, *own_data, *DETR]},
        "03_what_is_wrong": {"run": "small", "settings": [*every, *DETR]},
        "04_compare": {
            "detectors": {"RT-DETR-v2": ("train_detr", [*map(str, DETR)]), "SSD": ("train_ssd", SSD)},
            "seeds": [0, 1], "settings": every,
        },
        "05_your_detector": {"settings": coco, "short": []},
        "06_scene_graphs": {"settings": [*coco, "--model.hidden_dim", 16, "--model.embed_dim", 8]},
        "07_processes": {"processes": 2, "settings": [*every, *DETR]},
        "08_fine_tune": {"source": trained and str(trained / "final"), "settings": every},
        "09_weights_and_biases": {"settings": some},
    }[stem]  # fmt: skip
    return given | {"settings": [*map(str, given["settings"])]}


def code_of(notebook) -> list:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def parsed(cell) -> ast.Module:
    source = cell.source
    if source.startswith("%%writefile"):
        return ast.parse(source.split("\n", 1)[1])
    return ast.parse(TransformerManager().transform_cell(source))  # %pip, as IPython reads it


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_stored_with_what_its_cells_show(path):
    """Pictures and curves are seen without running anything; nothing in them is of one machine or moment."""
    assert path.stem.startswith(f"{NOTEBOOKS.index(path) + 1:02d}_"), "numbered without a gap"
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = code_of(notebook)
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), "run from first to last"
    assert faults(notebook) == []
    assert any("image/png" in output.get("data", {}) for cell in code for output in cell.outputs), "a curve"
    assert path.stat().st_size <= LARGEST_BYTES
    assert notebook.cells[0].source.startswith("# ") and "pip" in code[0].source, "a title, and what installs on Colab"
    assert sum("parameters" in cell.metadata.get("tags", []) for cell in code) == 1
    assert set(notebook.metadata) <= {"kernelspec", "language_info"}


def test_what_must_not_be_stored_is_found_and_left_out(tmp_path):
    said = f"run folder: {tmp_path}/runs/a\n10 %\rdone\nepoch 1  step 1/9  eta 0:00:02\nTraining took 3.5 s\nAP 0.31\n"
    output, cell = nbformat.v4.new_output, nbformat.v4.new_code_cell
    given = [output("stream", name="stdout", text=said), output("stream", name="stderr", text="UserWarning: a\n"),
             output("stream", name="stdout", text="best AP 0.31\n"),
             output("execute_result", data={"text/html": f"<a href='{ROOT}/runs/b'>b</a>"})]  # fmt: skip
    notebook = nbformat.v4.new_notebook(cells=[cell(), cell("1", outputs=given)])
    wrong = " ".join(faults(notebook))
    assert "'0:00:02'" in wrong and "stderr" in wrong and "path" in wrong
    stored = storable(notebook, tmp_path)
    text, link = stored.cells[0].outputs
    assert text.text == "run folder: ../runs/a\ndone\nAP 0.31\nbest AP 0.31\n" and faults(stored) == []
    assert link.data["text/html"] == "<a href='../runs/b'>b</a>"
    error = output("error", ename="ValueError", evalue="", traceback=[])
    assert faults(nbformat.v4.new_notebook(cells=[cell(outputs=[error])])) == ["code cell 0: error"]


def test_lines_are_put_into_a_copy_of_a_script(tmp_path, capsys):
    added = {"t.optimizer.step()": "a = 1\nb = 2", "t = s.training(": "c = 3"}
    module = import_changed("train_ssd", tmp_path / "changed_ssd.py", added)
    text, original = (tmp_path / "changed_ssd.py").read_text(), (ROOT / "scripts" / "train_ssd.py").read_text()
    assert "t.optimizer.step()\n        a = 1\n        b = 2\n" in text
    kept = [line for line in text.splitlines() if line.strip() not in ("a = 1", "b = 2", "c = 3")]
    assert kept == original.splitlines()
    assert "+        b = 2" in capsys.readouterr().out
    assert module.Config.__module__ == "changed_ssd" and module.DEFAULT_CONFIG.is_file()
    with pytest.raises(BadInput, match="train_ssd.py: 0 lines begin with 'no such line'; expected one"):
        import_changed("train_ssd", tmp_path / "other.py", {"no such line": ""})


def test_every_name_is_there_before_it_is_used():
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821", *map(str, NOTEBOOKS)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_is_imported_from_the_toolkit_and_the_parameters_are_there(path, data):
    code = code_of(nbformat.read(path, as_version=4))
    for node in (node for cell in code for node in ast.walk(parsed(cell)) if isinstance(node, ast.ImportFrom)):
        for name in (alias.name for alias in node.names if node.module.startswith("toolkit")):
            assert hasattr(import_module(node.module), name) or find_spec(f"{node.module}.{name}"), ast.unparse(node)
    (cell,) = (c for c in code if "parameters" in c.metadata.get("tags", []))
    assigned = {target.id for line in parsed(cell).body for target in line.targets}
    assert set(parameters(path.stem, data, None)) == assigned
    files = [c.source for c in code if c.source.startswith("%%writefile")]
    assert path.stem != "05_your_detector" or len(files) == 1 and files[0].count("\n") < 60, "a short detector"


def executed(path: Path, values: dict, folder: Path, monkeypatch) -> tuple[str, int]:
    for key, value in environment(folder).items():
        monkeypatch.setenv(key, value)
    notebook = storable(client(path, folder / "runs", values).execute(), folder.parent)  # the data lie there, too
    assert faults(notebook) == [], "it can be stored"
    outputs = [output for cell in code_of(notebook) for output in cell.outputs]
    pictures = sum(bool({"image/png", "image/jpeg"} & set(output.get("data", {}))) for output in outputs)
    shown = (output.get("text", "") + output.get("data", {}).get("text/html", "") for output in outputs)
    return "".join(shown), pictures


@pytest.mark.slow
def test_the_first_runs_to_its_end(data, tmp_path, monkeypatch):
    text, pictures = executed(NOTEBOOKS[0], parameters("01_train_detr", data, None), tmp_path, monkeypatch)
    assert pictures >= 5 and "evaluation at step 4" in text
    assert (tmp_path / "runs" / "small" / "final" / "model.safetensors").exists()


SAID = {
    "02_your_data": "usable images", "03_what_is_wrong": "precision 0.75", "04_compare": "SSD, seed 0 against",
    "05_your_detector": "t.announce(", "06_scene_graphs": "TDE", "07_processes": "first step",
    "08_fine_tune": "lines in pretrained.txt", "09_weights_and_biases": "Run summary",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS[1:], ids=lambda path: path.stem)
def test_runs_to_the_end(path, data, trained, tmp_path, monkeypatch):
    text, pictures = executed(path, parameters(path.stem, data, trained), tmp_path, monkeypatch)
    assert SAID[path.stem] in text
    assert pictures >= 1
    if path.stem == "07_processes":
        assert json.loads((tmp_path / "runs" / "processes_several" / "environment.json").read_text())["processes"] == 2
        difference = float(text.rsplit("first ten: ", 1)[1].split()[0])
        assert difference < 1e-4, "the images of a step are the same, however many processes it has"


@pytest.mark.slow
def test_an_interrupted_cell_saves_and_goes_on(data, tmp_path, monkeypatch):
    """What the square of Jupyter sends, while the first notebook trains; then the same cell again."""
    for key, value in environment(tmp_path).items():
        monkeypatch.setenv(key, value)
    values = parameters("01_train_detr", data, None)
    at = values["settings"].index("--run.max_steps") + 1
    values["settings"][at] = "24"
    values["settings"] += ["--run.resume", "latest", "--run.eval_every", "0"]
    notebook = client(NOTEBOOKS[0], tmp_path / "runs", values)
    row = next(i for i, cell in enumerate(notebook.nb.cells) if cell.source.startswith("last_row = train_live("))
    again = nbformat.v4.new_code_cell(notebook.nb.cells[row].source)
    notebook.nb.cells[row + 1 :] = [again]
    metrics = tmp_path / "runs" / "small" / "metrics.jsonl"

    def interrupt():
        while not (metrics.exists() and metrics.read_text().count("\n") >= 5):
            time.sleep(0.05)
        os.kill(notebook.km.provisioner.process.pid, signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    asyncio.run(notebook.async_execute())
    first, second = ("".join(o.get("text", "") for o in cell.outputs) for cell in notebook.nb.cells[row:])
    assert "Run this cell again to go on" in first and "SIGINT" in first
    assert json.loads((tmp_path / "runs" / "small" / "status.json").read_text())["state"] == "done"
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines() if "train/loss" in line]
    assert steps == list(range(1, 25)), "no step is missing, and none was done twice"
