"""Runs notebooks as they stand and stores what their cells show.

    python tests/store_notebooks.py                    # all, one after another; minutes each on two cores
    python tests/store_notebooks.py 05_your_detector   # some

What depends on the machine or the moment is left out: paths, times, progress, warnings.
"""

import base64
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path

import nbclient
import nbformat
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
LARGEST_BYTES, LARGE_PICTURE = 500_000, 40_000
TIMES = re.compile(r"\b\d+:\d\d(:\d\d)?\b|\b[\d.]+ ?(s|ms|sec|seconds|minutes|[KMG]i?B)\b|img/s")
HOMES = ("home", "root", "tmp", "var")  # of users and temporary files, whatever the machine
MACHINE = re.compile("".join(f"/{name}/|" for name in HOMES) + r"\bUsers/|" + re.escape(str(ROOT)))
OFFLINE_RUN = re.compile(r"offline-run-\d+_\d+-\w+")


def environment(folder: Path) -> dict[str, str]:
    """The kernel's settings are in `folder`, its modules of the checkout; one thread, no GPU."""
    return os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "IPYTHONDIR": str(folder),
                         "PYTHONPATH": str(ROOT)}  # fmt: skip


def client(path: Path, runs: Path, values: Mapping | None = None, timeout_s: int = 400) -> nbclient.NotebookClient:
    """To run a notebook in the folder `notebooks` beside `runs`, where its runs go.

    values: what the cell of parameters says instead.
    """
    notebook = nbformat.read(path, as_version=4)
    if values is not None:
        (cell,) = (cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", []))
        cell.source = "\n".join(f"{name} = {value!r}" for name, value in values.items())
    here = runs.parent / "notebooks"
    here.mkdir(parents=True, exist_ok=True)
    redirect = "import pathlib, toolkit.tools.notebook as shared"
    redirect += f"\nshared.runs_folder = lambda: pathlib.Path({str(runs)!r})"
    notebook.cells.insert(0, nbformat.v4.new_code_cell(redirect))
    return nbclient.NotebookClient(notebook, timeout=timeout_s, kernel_name="python3", record_timing=False,
                                   resources={"metadata": {"path": str(here)}})  # fmt: skip


def storable(executed: nbformat.NotebookNode, folder: Path) -> nbformat.NotebookNode:
    """What `client` ran below `folder`, without what another machine would show otherwise."""
    executed.cells.pop(0)  # what `client` put there
    executed.metadata["language_info"] = {"name": "python"}
    for count, cell in enumerate((c for c in executed.cells if c.cell_type == "code"), 1):
        cell.execution_count, kept = count, []
        for output in cell.outputs:
            if output.output_type == "execute_result":
                output.execution_count = count
            if output.output_type == "stream":
                if output.name == "stderr":
                    continue
                output.text = _lines(output.text, folder)
                if kept and kept[-1].output_type == "stream":
                    kept[-1].text += output.text
                    continue
                if not output.text:
                    continue
            elif "data" in output:
                texts = {key: _lines(text, folder) for key, text in output.data.items() if key.startswith("text/")}
                output.data |= texts
                _shrink_pictures(output.data)
            kept.append(output)
        cell.outputs = kept
    return executed


def _shrink_pictures(data: dict) -> None:
    """Large pictures become JPEG files of at most 700 pixels: a page to be read needs no more."""
    for kind in ("image/png", "image/jpeg"):
        if len(data.get(kind, "")) > LARGE_PICTURE:
            picture, smaller = Image.open(BytesIO(base64.b64decode(data.pop(kind)))).convert("RGB"), BytesIO()
            picture.thumbnail((700, 700))
            picture.save(smaller, "JPEG", quality=70)
            data["image/jpeg"] = base64.b64encode(smaller.getvalue()).decode()


def _lines(text: str, folder: Path) -> str:
    for place, name in ((folder, ".."), (ROOT, ".."), (Path.home(), "~")):
        text = text.replace(str(place), name)
    lines = (line.rpartition("\r")[2] for line in OFFLINE_RUN.sub("offline-run-*", text).splitlines(keepends=True))
    return "".join(line for line in lines if not TIMES.search(line))


def faults(notebook: nbformat.NotebookNode) -> list[str]:
    """What must not be stored, in words."""
    found = []
    for i, cell in enumerate(c for c in notebook.cells if c.cell_type == "code"):
        for output in cell.outputs:
            shown = {"text/stream": output.get("text", ""), **output.get("data", {})}
            text = "".join(value for key, value in shown.items() if key.startswith("text/"))
            kind = "stderr" if output.get("name") == "stderr" else output.output_type
            found += [f"code cell {i}: {kind}"] * (kind in ("error", "stderr"))
            found += [f"code cell {i}: {what} {hit.group()!r}" for what, pattern in (("time", TIMES), ("path", MACHINE))
                      if (hit := pattern.search(text))]  # fmt: skip
    return found


def main(names: list[str]) -> None:
    folder = Path(tempfile.mkdtemp(prefix="notebooks-")).resolve()
    os.environ |= environment(folder)
    try:
        for path in NOTEBOOKS:  # in this order: later ones use the run of the first
            if names and path.stem not in names:
                continue
            notebook = storable(client(path, folder / "runs", timeout_s=3600).execute(), folder)
            text = nbformat.writes(notebook)
            if wrong := faults(notebook):
                raise SystemExit(f"{path.name} is not stored: {'; '.join(wrong)}")
            if len(text.encode()) > LARGEST_BYTES:
                raise SystemExit(f"{path.name} is not stored: {len(text.encode())} bytes, more than {LARGEST_BYTES}")
            path.write_text(text + "\n")
            print(f"{path.name}: {len(text.encode()) // 1000} kB", flush=True)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main(sys.argv[1:])
