"""The notebooks as stored show what their code does today, and run from the first cell to the last one.

`tests/support/store_notebooks.py` (`make notebook-outputs`) stores what their cells show.
"""

import ast
import asyncio
import contextlib
import io
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
from IPython.lib.pretty import pretty
from places import ROOT
from store_notebooks import LARGEST_BYTES, NOTEBOOKS, client, code_of, environment, faults, storable

from toolkit.base.errors import BadInput
from toolkit.tools.notebook import import_changed
from toolkit.tools.shapes import make_shapes

SMALL_DETR = "--model.d_model 32 --model.heads 2 --model.ffn_dim 32 --model.decoder_layers 2 --model.num_queries 20"
SMALL_SSD = ["--model.backbone", "test_resnet", "--model.strides", "[8, 16, -1]", "--model.channels", "[32, 32, 32]"]
SMALL_SSD += ["--model.aspect_ratios", "[[2.0], [2.0], [2.0]]"]
SHORT = "--run.max_steps 4 --run.max_minutes null --run.log_every 1"
OF_DATA = "--data.image_size 64 --data.workers 0 --data.batch_size_per_device 2"
# What each notebook prints when it runs with small settings.
SAID = {
    "01_train_detr": "evaluation at step 4",
    "02_your_data": "usable images",
    "03_what_is_wrong": "precision 0.75",
    "04_compare": "SSD, seed 0 against",
    "05_your_detector": "t.announce(",
    "06_scene_graphs": "TDE",
    "07_processes": "first step",
    "08_fine_tune": "lines in pretrained.txt",
    "09_weights_and_biases": "Run summary",
}
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "shapes"
    make_shapes(folder, train_images=8, val_images=4, image_size=64)
    return folder / "annotations"


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    words = [*on(data), *SMALL_DETR.split(), "--run.name", "base", "--run.output_dir", str(folder)]
    command = [sys.executable, str(ROOT / "scripts" / "train_detr.py"), *words]
    subprocess.run(command, check=True, env=environment(folder))
    return folder / "base"


def on(data: Path) -> list[str]:
    """Settings of a short training on a COCO data set."""
    places = f"--data.train {data / 'train.json'} --data.val {data / 'val.json'} --data.format coco"
    return f"{SHORT} --run.eval_every 2 {places} {OF_DATA}".split()


def parameters(stem: str, data: Path, trained: Path | None) -> dict:
    """What the cell of parameters says instead."""
    some = on(data)
    detr = SMALL_DETR.split()
    named = ["--run.name", "small"]
    return {
        "01_train_detr": {"settings": [*named, *some, *detr]},
        "02_your_data": {"folder": None, "settings": [*named, *SHORT.split(), *OF_DATA.split(), *detr]},
        "03_what_is_wrong": {"run": "small", "settings": [*some, *detr]},
        "04_compare": {
            "detectors": {"RT-DETR-v2": ("train_detr", detr), "SSD": ("train_ssd", SMALL_SSD)},
            "seeds": [0, 1],
            "settings": some,
        },
        "05_your_detector": {"settings": [*named, *some], "short": []},
        "06_scene_graphs": {"settings": [*named, *some, "--model.hidden_dim", "16", "--model.embed_dim", "8"]},
        "07_processes": {"processes": 2, "settings": [*some, *detr]},
        # The second training has the queries of the default settings, which need that many places in an image.
        "08_fine_tune": {"source": trained and str(trained / "final"), "settings": [*some, "--data.image_size", "96"]},
        "09_weights_and_biases": {"settings": [*named, *some, *detr]},
    }[stem]


def cells(path: Path) -> list:
    return code_of(nbformat.read(path, as_version=4))


def has_parameters(cell) -> bool:
    return "parameters" in cell.metadata.get("tags", [])


def parsed(cell) -> ast.Module:
    source = cell.source
    if source.startswith("%%writefile"):
        return ast.parse(source.split("\n", 1)[1])
    return ast.parse(TransformerManager().transform_cell(source))  # %pip, as IPython reads it


def printed(cell) -> str:
    return "".join(output.get("text", "") for output in cell.outputs)


# ---- as stored -------------------------------------------------------------------------------------------------------


@each_notebook
def test_stored_with_what_its_cells_show(path):
    """Pictures and curves are seen without running anything; nothing in them is of one machine or moment."""
    assert path.stem.startswith(f"{NOTEBOOKS.index(path) + 1:02d}_"), "numbered without a gap"
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = code_of(notebook)
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), "run from first to last"
    assert faults(notebook) == []
    kinds = {kind for cell in code for output in cell.outputs for kind in output.get("data", {})}
    assert kinds & {"image/png", "image/jpeg"}, "a curve or a picture; large ones are stored as JPEG"
    assert path.stat().st_size <= LARGEST_BYTES
    assert notebook.cells[0].source.startswith("# "), "a title"
    assert "pip" in code[0].source, "what installs on Colab"
    assert sum(map(has_parameters, code)) == 1
    assert set(notebook.metadata) <= {"kernelspec", "language_info"}


def changed_scripts() -> list:
    """(notebook, cell, call of `import_changed` in it): each prints the lines of a loop around its own."""
    found = []
    for path in NOTEBOOKS:
        for cell in cells(path):
            if "import_changed(" in cell.source:
                calls = [node for node in ast.walk(parsed(cell)) if isinstance(node, ast.Call)]
                found += [(path, cell, call) for call in calls if ast.unparse(call.func) == "import_changed"]
    return found


@pytest.mark.parametrize(("path", "cell", "call"), changed_scripts())
def test_a_shown_loop_is_that_of_the_script(path, cell, call, tmp_path, monkeypatch):
    """`make notebook-outputs` stores the loop of today."""
    monkeypatch.chdir(tmp_path)
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        import_changed(*map(ast.literal_eval, call.args))
    assert printed(cell).startswith(shown.getvalue()), f"{path.name} shows another loop: make notebook-outputs"


def test_shown_settings_are_those_of_the_configuration():
    """The first notebook shows what the file of defaults says of the model."""
    names = {}
    code = cells(NOTEBOOKS[0])
    (given,) = (cell for cell in code if "config.model.given" in cell.source)
    (first,) = filter(has_parameters, code)
    exec(first.source, names)
    exec(given.source, names)
    (output,) = given.outputs
    assert output.data["text/plain"] == pretty(names["config"].model.given), "make notebook-outputs"


def test_what_must_not_be_stored_is_found_and_left_out(tmp_path):
    said = f"run folder: {tmp_path}/runs/a\n10 %\rdone\nepoch 1  step 1/9  eta 0:00:02\nTraining took 3.5 s\nAP 0.31\n"
    output = nbformat.v4.new_output
    cell = nbformat.v4.new_code_cell
    given = [
        output("stream", name="stdout", text=said),
        output("stream", name="stderr", text="UserWarning: a\n"),
        output("stream", name="stdout", text="best AP 0.31\n"),
        output("execute_result", data={"text/html": f"<a href='{ROOT}/runs/b'>b</a>"}),
    ]
    notebook = nbformat.v4.new_notebook(cells=[cell(), cell("1", outputs=given)])
    wrong = " ".join(faults(notebook))
    for word in ("'0:00:02'", "stderr", "path"):
        assert word in wrong
    stored = storable(notebook, tmp_path)
    assert faults(stored) == []
    text, link = stored.cells[0].outputs
    assert text.text == "run folder: ../runs/a\ndone\nAP 0.31\nbest AP 0.31\n"
    assert link.data["text/html"] == "<a href='../runs/b'>b</a>"
    error = output("error", ename="ValueError", evalue="", traceback=[])
    assert faults(nbformat.v4.new_notebook(cells=[cell(outputs=[error])])) == ["code cell 0: error"]


def test_every_name_is_there_before_it_is_used():
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821", *map(str, NOTEBOOKS)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@each_notebook
def test_imports_and_parameters_are_there(path, data):
    code = cells(path)
    for node in (node for cell in code for node in ast.walk(parsed(cell)) if isinstance(node, ast.ImportFrom)):
        for name in (alias.name for alias in node.names if node.module.startswith("toolkit")):
            assert hasattr(import_module(node.module), name) or find_spec(f"{node.module}.{name}"), ast.unparse(node)
    (cell,) = filter(has_parameters, code)
    assigned = {target.id for line in parsed(cell).body for target in line.targets}
    assert set(parameters(path.stem, data, None)) == assigned


def test_a_detector_of_ones_own_is_short():
    (cell,) = (cell for cell in cells(NOTEBOOKS[4]) if cell.source.startswith("%%writefile"))
    assert cell.source.count("\n") < 60


# ---- the functions that they call ------------------------------------------------------------------------------------


def test_lines_are_put_into_a_copy_of_a_script(tmp_path, capsys):
    added = {"t.optimizer.step()": "a = 1\nb = 2", "t = s.training(": "c = 3"}
    module = import_changed("train_ssd", tmp_path / "changed_ssd.py", added)
    text = (tmp_path / "changed_ssd.py").read_text()
    assert "t.optimizer.step()\n        a = 1\n        b = 2\n" in text
    kept = [line for line in text.splitlines() if line.strip() not in ("a = 1", "b = 2", "c = 3")]
    assert kept == (ROOT / "scripts" / "train_ssd.py").read_text().splitlines()
    assert "+        b = 2" in capsys.readouterr().out
    assert module.Config.__module__ == "changed_ssd"
    assert module.DEFAULT_CONFIG.is_file()
    with pytest.raises(BadInput, match="train_ssd.py: 0 lines begin with 'no such line'; expected one"):
        import_changed("train_ssd", tmp_path / "other.py", {"no such line": ""})


# ---- run -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@each_notebook
def test_runs_to_the_end(path, data, trained, tmp_path, monkeypatch):
    for key, value in environment(tmp_path).items():
        monkeypatch.setenv(key, value)
    executed = client(path, tmp_path / "runs", parameters(path.stem, data, trained)).execute()
    notebook = storable(executed, tmp_path.parent)  # the data lie there, too
    assert faults(notebook) == [], "it can be stored"
    outputs = [output for cell in code_of(notebook) for output in cell.outputs]
    text = "".join(output.get("text", "") + output.get("data", {}).get("text/html", "") for output in outputs)
    assert SAID[path.stem] in text
    pictures = [output for output in outputs if {"image/png", "image/jpeg"} & set(output.get("data", {}))]
    assert len(pictures) >= (5 if path.stem == "01_train_detr" else 1)
    if path.stem == "01_train_detr":
        assert (tmp_path / "runs" / "small" / "final" / "model.safetensors").exists()
    if path.stem == "07_processes":
        assert json.loads((tmp_path / "runs" / "processes_several" / "environment.json").read_text())["processes"] == 2
        difference = float(text.rsplit("first ten: ", 1)[1].split()[0])
        assert difference < 1e-4, "the images of a step are the same, however many processes it has"


@pytest.mark.slow
def test_an_interrupted_cell_saves_and_goes_on(data, tmp_path, monkeypatch):
    """What the square of Jupyter sends, while the first notebook trains; then the same cell again."""
    for key, value in environment(tmp_path).items():
        monkeypatch.setenv(key, value)
    settings = parameters("01_train_detr", data, None)["settings"]
    settings[settings.index("--run.max_steps") + 1] = "24"
    settings += ["--run.resume", "latest", "--run.eval_every", "0"]
    notebook = client(NOTEBOOKS[0], tmp_path / "runs", {"settings": settings})
    places = [i for i, cell in enumerate(notebook.nb.cells) if cell.source.startswith("last_row = train_live(")]
    place = places[0]
    notebook.nb.cells[place + 1 :] = [nbformat.v4.new_code_cell(notebook.nb.cells[place].source)]
    metrics = tmp_path / "runs" / "small" / "metrics.jsonl"

    def interrupt():
        while not (metrics.exists() and metrics.read_text().count("\n") >= 5):
            time.sleep(0.05)
        os.kill(notebook.km.provisioner.process.pid, signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    asyncio.run(notebook.async_execute())
    first = printed(notebook.nb.cells[place])
    assert "Run this cell again to go on" in first
    assert "SIGINT" in first
    assert json.loads((tmp_path / "runs" / "small" / "status.json").read_text())["state"] == "done"
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines() if "train/loss" in line]
    assert steps == list(range(1, 25)), "no step is missing, and none was done twice"
