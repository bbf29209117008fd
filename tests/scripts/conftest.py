"""End-to-end tests of the training scripts: each test runs for every script in `SCRIPTS`.

`make test` runs all of them for the first script and those marked `every_script` for the others; `make test-slow` runs
all for all.

Runs are forked from one process that has everything imported (`server.py`); what goes wrong in them, and when, is
told by `faults.py`. A few tests start processes of their own, where launchers and exit codes are what is tested.
"""

import json
import signal

import pytest
from launching import REPORT, Script, Server, rows

from toolkit.data.shapes import make_shapes

# A shell starts what runs in the background with SIGINT ignored, and children inherit that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

SCRIPTS = (
    Script("train_detr", slow_end=(REPORT,)),
    Script("train_yolov3", slow_end=(REPORT,), losses=("loss_cls", "loss_obj"), still=(),
           one_size=("--data.multi_scale", "[]")),
    Script("train_faster_rcnn", slow_end=(REPORT,), losses=("loss_box_reg", "loss_classifier")),
    Script("train_sgg", slow_end=(REPORT,), losses=("loss_refine_obj", "loss_rel"),
           still=("--model.freeze", "detector")),
    Script("train_ssd", slow_end=(REPORT,), losses=("loss_cls", "loss_loc"), still=("--model.norm", "group"),
           one_size=("--data.multi_scale", "[]")),
)  # fmt: skip


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """What is the core's and does not differ between scripts is a slow test of the other scripts."""
    for item in items:
        script = getattr(item, "callspec", None) and item.callspec.params.get("script")
        if isinstance(script, Script) and script != SCRIPTS[0] and not item.get_closest_marker("every_script"):
            item.add_marker("slow")


def pairs(args) -> dict:
    return dict(zip(args[::2], args[1::2], strict=True))


@pytest.fixture(params=SCRIPTS, ids=lambda script: script.name, scope="session")
def script(request) -> Script:
    return request.param


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    server = Server(folder, {"DETECTION_TOOLKIT_CACHE": str(folder / "cache"), "WANDB_MODE": "offline"})
    yield server
    server.close()


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """A COCO dataset of 18 + 10 small pictures of four classes; one of the training images is a background."""
    folder = tmp_path_factory.mktemp("data") / "shapes"
    make_shapes(folder, train_images=18, val_images=10, image_size=64)
    path = folder / "annotations" / "train.json"
    document = json.loads(path.read_text())
    background = document["images"][3]["id"]
    for key in ("annotations", "rel_annotations"):
        document[key] = [entry for entry in document[key] if entry["image_id"] != background]
    path.write_text(json.dumps(document))
    return folder


@pytest.fixture(scope="session")
def settings(script, data):
    """`settings("--run.name", "x", ...)`: the script's small settings on `data`; those given win."""

    def build(*args) -> list[str]:
        annotations = data / "annotations"
        common = {
            "--data.train": annotations / "train.json", "--data.val": annotations / "val.json", "--data.format": "coco",
            "--data.image_size": 64, "--data.workers": 0, "--data.batch_size_per_device": 4, "--run.log_every": 1,
            "--run.name": "run", "--run.epochs": 2, "--run.max_minutes": "null", "--eval.batch_size_per_device": 3,
            "--eval.pictures": 0, "--optim.ema_decay": 0.9,
        }  # fmt: skip
        merged = {"--config": script.config} | common | pairs(args)
        return [str(part) for pair in merged.items() for part in pair]

    return build


@pytest.fixture(scope="session")
def resumable(server, script, settings, tmp_path_factory):
    """`resumable(processes)` -> (arguments but the name, folder of an uninterrupted run with them).

    Six steps over two epochs (three epochs of two steps for three processes): two micro-batches a step, one in the last
    of an epoch; evaluated at 2, 4 and 6, saved at 3, 6 and when better; with all that has a state: workers, dropout,
    flips, a moving average, best and patience.
    """
    runs = {}

    def build(processes: int):
        if processes not in runs:
            batch, eval_batch, epochs = {1: (4, 3, 2), 2: (2, 2, 2), 3: (2, 1, 3)}[processes]
            args = settings(
                "--run.output_dir", tmp_path_factory.mktemp(f"resumable{processes}"), "--data.workers", 2,
                "--data.batch_size_per_device", batch, "--eval.batch_size_per_device", eval_batch,
                "--optim.accumulation_steps", 2, "--run.eval_every", 2, "--run.save_every", 3, "--run.keep", 1,
                "--run.epochs", epochs, "--run.resume", "latest", "--eval.metric_for_best", "bbox_AR100",
                "--eval.early_stopping_patience", 5,
            )  # fmt: skip
            folder = server.run(script, [*args, "--run.name", "reference"], processes).ok().folder
            assert [row["step"] for row in rows(folder)] == [1, 2, 2, 3, 4, 4, 5, 6, 6]
            runs[processes] = args, folder
        return runs[processes]

    return build
