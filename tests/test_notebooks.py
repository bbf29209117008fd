"""The notebooks as stored, and run from their first to their last cell with small settings.

    python -m pytest tests/test_notebooks.py
"""

import os
from pathlib import Path

import nbclient
import nbformat
import pytest

from toolkit.data.shapes import make_shapes

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "shapes"
    make_shapes(folder, train_images=8, val_images=4, image_size=64)
    return folder / "annotations"


def small_settings(data: Path, folder: Path) -> dict[str, list]:
    """Settings of each notebook that make it run in seconds."""
    common = [
        "--run.output_dir", folder, "--run.name", "small", "--run.max_steps", 4, "--run.max_minutes", "null",
        "--run.log_every", 1, "--run.eval_every", 2, "--data.train", data / "train.json", "--data.val",
        data / "val.json", "--data.format", "coco", "--data.image_size", 64, "--data.workers", 0,
        "--data.batch_size_per_device", 2,
    ]  # fmt: skip
    detr = ["--model.d_model", 32, "--model.heads", 2, "--model.ffn_dim", 32, "--model.decoder_layers", 2,
            "--model.num_queries", 20]  # fmt: skip
    return {"01_train_detr": [*common, *detr]}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_stored_without_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)
    assert notebook.cells[0].source.startswith("# ")
    assert sum("parameters" in cell.metadata.get("tags", []) for cell in code) == 1
    assert set(notebook.metadata) <= {"kernelspec", "language_info"}
    assert "/home/" not in path.read_text() and "/root/" not in path.read_text()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_to_the_end(path, data, tmp_path, monkeypatch):
    for key, value in {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "IPYTHONDIR": str(tmp_path)}.items():
        monkeypatch.setitem(os.environ, key, value)
    notebook = nbformat.read(path, as_version=4)
    (parameters,) = (cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", []))
    assert parameters.source.startswith("settings = [")
    parameters.source = f"settings = {[str(part) for part in small_settings(data, tmp_path)[path.stem]]!r}"
    here = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=240, kernel_name="python3", resources=here).execute()

    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(pictures) >= 4
    text = "".join(output.get("text", "") for output in outputs if output.output_type == "stream")
    assert "evaluation at step 4" in text
    assert (tmp_path / "small" / "final" / "model.safetensors").exists()
