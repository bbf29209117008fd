"""Shared code of the notebooks: scripts and their settings, pictures, and training with live curves."""

import difflib
import importlib
import io
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from matplotlib.figure import Figure
from torch import Tensor

from toolkit.base.errors import BadInput, Preempted
from toolkit.base.files import PACKAGE, ROOT
from toolkit.data.dataset import row_target
from toolkit.data.table import DetectionTable
from toolkit.run.command_line import parse_config
from toolkit.run.metrics_log import read_metrics
from toolkit.run.open_run import load_script
from toolkit.tools.report.charts import LineChart, figure
from toolkit.tools.report.figures import STEP_AXIS, smooth_lines

CURVES = {
    "loss of training": ["train/loss"],
    "on held-out images": ["val/bbox_AP50", "val/bbox_AP", "val/ema/bbox_AP", "val/segm_AP", "val/ema/segm_AP"],
}


def import_script(name: str) -> ModuleType:
    """Import a script of this project, such as `train_detr`, as a module."""
    folder = str(ROOT / "scripts")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module(name)


def import_changed(name: str, file: Path | str, below: Mapping[str, str]) -> ModuleType:
    """Write a copy of a script with added lines, print the difference, and import the copy as a module.

    Args:
        name: name of the script, such as `train_detr`.
        file: path of the copy, such as "my_loop.py"; its runs record this path as their script.
        below: {beginning of a line in the script: text to insert below that line}; the text gets the indentation of
            the line.

    Raises:
        BadInput: no line, or more than one, begins like this.
    """
    before = Path(import_script(name).__file__).read_text(encoding="utf-8").splitlines(keepends=True)
    after = list(before)
    for start, added in below.items():
        at = [i for i, line in enumerate(after) if line.strip().startswith(start)]
        if len(at) != 1:
            raise BadInput(f"{name}.py: {len(at)} lines begin with {start!r}; expected one, to put lines below it")
        indent = after[at[0]][: -len(after[at[0]].lstrip())]
        after[at[0] + 1 : at[0] + 1] = [f"{indent}{line}\n" for line in added.splitlines()]
    path = Path(file).resolve()
    path.write_text("".join(after), encoding="utf-8")
    print("".join(difflib.unified_diff(before, after, f"{name}.py", path.name, n=1)))
    module = load_script(path, path.stem)
    module.DEFAULT_CONFIG = import_script(name).DEFAULT_CONFIG  # a script finds it relative to its own path
    return module


def config_of(script: ModuleType, *settings: object) -> object:
    """Return the Config of a training script with the given settings.

    settings: words of the command line, such as "--run.epochs", 2. Runs are written to `runs_folder()` unless a setting
    says otherwise. Raises BadInput as the command line does.
    """
    words = [str(word) for word in settings]
    return parse_config(
        script.Config,
        words,
        script.DEFAULT_CONFIG,
        {"run.output_dir": str(runs_folder())},
    )


def folder_of(config: object) -> Path:
    """Return the run folder of a Config."""
    return Path(config.run.output_dir) / config.run.name


def runs_folder() -> Path:
    """Return the folder for the runs of notebooks: `runs` in the checkout of this project, or in the current folder if
    the toolkit is an installed package."""
    return (ROOT if ROOT != PACKAGE else Path.cwd()) / "runs"


def image_and_target(table: DetectionTable, index: int) -> tuple[Tensor, dict]:
    """Return an image of a table without augmentation, uint8 (3, H, W), and its target."""
    row = table.row(index)
    image = table.decode_image(row)
    return image, row_target(row, tuple(image.shape[-2:]))


def show(pictures: Sequence, titles: Sequence[str] = (), columns: int = 3) -> None:
    """Show PIL images (or arrays) in a grid of `columns` columns, below their titles, in the output of a cell."""
    from IPython.display import Image, display  # which notebooks alone have

    rows = -(-len(pictures) // columns)
    figure = Figure(figsize=(3 * columns, 3 * max(rows, 1)), layout="constrained")
    for i, picture in enumerate(pictures):
        axes = figure.add_subplot(rows, columns, i + 1)
        axes.imshow(picture)
        axes.axis("off")
        axes.set_title(titles[i] if titles else "", fontsize=9)
    display(Image(_encoded(figure, "jpeg")))  # for photographs a tenth of the size of a PNG


def train_live(main: Callable, config: object, curves: Mapping[str, Sequence[str]] = CURVES) -> dict[str, float] | None:
    """Call `main(config)` of a script while curves of the run are drawn and updated, and return the last evaluation.

    If the cell is interrupted (the square, or I I), the run saves its state, and None is returned. Run the cell again
    with `--run.resume latest` among the settings to continue the run.

    curves: {title of a panel: keys of metrics.jsonl that are drawn in it}.
    """
    with live_curves(folder_of(config) / "metrics.jsonl", curves):
        try:
            return main(config)
        except Preempted as stopped:
            print(f"{stopped}. Run this cell again to go on.")
            return None


@contextmanager
def live_curves(file: Path, curves: Mapping[str, Sequence[str]], every_s: float = 3.0) -> Iterator[None]:
    """Show curves of a `metrics.jsonl` in the output of a cell, and update them during a `with` block.

    curves: see `train_live`. every_s: seconds between two checks for new rows, at least.
    """
    from IPython.display import Image, display  # which notebooks alone have

    handle = display(Image(_picture(file, curves)), display_id=True)
    drawn_at = 0.0
    ended = threading.Event()

    def draw() -> None:
        nonlocal drawn_at
        changed_at = file.stat().st_mtime if file.exists() else 0.0
        if changed_at != drawn_at:
            drawn_at = changed_at
            handle.update(Image(_picture(file, curves)))

    def draw_on() -> None:
        pause = every_s
        while not ended.wait(pause):
            start = time.perf_counter()
            draw()
            pause = max(every_s, 20 * (time.perf_counter() - start))  # at most a twentieth of the run's time

    thread = threading.Thread(target=draw_on, name="curves", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        draw()


def _picture(file: Path, curves: Mapping[str, Sequence[str]]) -> bytes:
    try:
        rows = read_metrics(file) if file.exists() else []
    except (BadInput, OSError):  # a row that is being written; the next drawing has it
        rows = []
    charts = []
    for title, keys in curves.items():
        lines = [line for i, key in enumerate(keys) for line in smooth_lines(rows, key, key, i)]
        charts.append(LineChart(title, lines, STEP_AXIS))
    return _encoded(figure(charts))


def _encoded(figure: Figure, form: str = "png") -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format=form, dpi=80)
    return file.getvalue()
