"""Runs notebooks as they stand and stores what their cells show.

    python tests/support/store_notebooks.py                    # all, one after another; minutes each on two cores
    python tests/support/store_notebooks.py 05_your_detector   # some

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
from places import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
LARGEST_BYTES, LARGE_PICTURE = 500_000, 40_000
TIMES = re.compile(r"\b\d+:\d\d(:\d\d)?\b|\b[\d.]+ ?(s|ms|sec|seconds|minutes|[KMG]i?B)\b|img/s")
HOMES = ("home", "root", "tmp", "var")  # of users and temporary files, whatever the machine
MACHINE = re.compile("".join(f"/{name}/|" for name in HOMES) + r"\bUsers/|" + re.escape(str(ROOT)))
OFFLINE_RUN = re.compile(r"offline-run-\d+_\d+-\w+")


def environment(folder: Path) -> dict[str, str]:
    """The kernel's settings are in `folder`, its modules of the checkout; one thread, no GPU."""
    variables = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(ROOT)}
    return os.environ | variables | {"IPYTHONDIR": str(folder)}


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
    place = {"metadata": {"path": str(here)}}
    options = {"timeout": timeout_s, "kernel_name": "python3", "record_timing": False, "resources": place}
    return nbclient.NotebookClient(notebook, **options)


def code_of(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def storable(executed: nbformat.NotebookNode, folder: Path) -> nbformat.NotebookNode:
    """What `client` ran below `folder`, without what another machine would show otherwise."""
    executed.cells.pop(0)  # what `client` put there
    executed.metadata["language_info"] = {"name": "python"}
    for count, cell in enumerate(code_of(executed), 1):
        cell.execution_count = count
        kept = []
        for output in cell.outputs:
            if output.output_type == "stream":
                _keep_text(kept, output, folder)
                continue
            if output.output_type == "execute_result":
                output.execution_count = count
            for key, text in output.get("data", {}).items():
                if key.startswith("text/"):
                    output.data[key] = _lines(text, folder)
            _shrink_pictures(output.get("data", {}))
            kept.append(output)
        cell.outputs = kept
    return executed


def _keep_text(kept: list, output: nbformat.NotebookNode, folder: Path) -> None:
    """Add printed text to the outputs that are kept, to the one before if that is printed too."""
    if output.name == "stderr":
        return
    output.text = _lines(output.text, folder)
    if kept and kept[-1].output_type == "stream":
        kept[-1].text += output.text
    elif output.text:
        kept.append(output)


def _shrink_pictures(data: dict) -> None:
    """Large pictures become JPEG files of at most 700 pixels: a page to be read needs no more."""
    for kind in ("image/png", "image/jpeg"):
        if len(data.get(kind, "")) > LARGE_PICTURE:
            picture = Image.open(BytesIO(base64.b64decode(data.pop(kind)))).convert("RGB")
            smaller = BytesIO()
            picture.thumbnail((700, 700))
            picture.save(smaller, "JPEG", quality=60)
            data["image/jpeg"] = base64.b64encode(smaller.getvalue()).decode()


def _lines(text: str, folder: Path) -> str:
    for place, name in ((folder, ".."), (ROOT, ".."), (Path.home(), "~")):
        text = text.replace(str(place), name)
    lines = (line.rpartition("\r")[2] for line in OFFLINE_RUN.sub("offline-run-*", text).splitlines(keepends=True))
    return "".join(line for line in lines if not TIMES.search(line))


def faults(notebook: nbformat.NotebookNode) -> list[str]:
    """What must not be stored, in words."""
    found = []
    for number, cell in enumerate(code_of(notebook)):
        for output in cell.outputs:
            shown = {"text/stream": output.get("text", ""), **output.get("data", {})}
            text = "".join(value for key, value in shown.items() if key.startswith("text/"))
            kind = "stderr" if output.get("name") == "stderr" else output.output_type
            if kind in ("error", "stderr"):
                found.append(f"code cell {number}: {kind}")
            for what, pattern in (("time", TIMES), ("path", MACHINE)):
                hit = pattern.search(text)
                if hit:
                    found.append(f"code cell {number}: {what} {hit.group()!r}")
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
            wrong = faults(notebook)
            if wrong:
                raise SystemExit(f"{path.name} is not stored: {'; '.join(wrong)}")
            if len(text.encode()) > LARGEST_BYTES:
                raise SystemExit(f"{path.name} is not stored: {len(text.encode())} bytes, more than {LARGEST_BYTES}")
            path.write_text(text + "\n")
            print(f"{path.name}: {len(text.encode()) // 1000} kB", flush=True)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main(sys.argv[1:])
