"""End-to-end tests of the training scripts: for the first of `SCRIPTS`, and for all of them where a test says so.

Loop and `main` of all five are the same text (tests/test_layers.py), so what the toolkit's core does when something
goes wrong is shown with the first. What depends on the detector is marked `every_script`; with "slow", `make test` runs
it for the first one alone.

Runs are forked from one process that has everything imported (`server.py`); what goes wrong in them, and when, is
told by `faults.py`. A few tests start processes of their own, where launchers and exit codes are what is tested.
"""

import json
import os
import signal

import pytest
from launching import SCRIPTS, Script, Server, rows, small_settings

from toolkit.tools.shapes import make_shapes

# A shell starts what runs in the background with SIGINT ignored, and children inherit that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


RESUMABLE = """
--data.workers 2 --optim.accumulation_steps 2 --run.eval_every 2 --run.save_every 3 --run.keep 1 --run.resume latest
--eval.metric_for_best bbox_AR100 --eval.early_stopping_patience 5
"""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """What does not differ between scripts is shown with the first one alone."""
    kept = {True: [], False: []}
    for item in items:
        if os.name != "posix" and {"script", "server"} & set(item.fixturenames):
            item.add_marker(pytest.mark.skip(reason="its runs are forked and get signals, which Windows has not"))
        script = getattr(item, "callspec", None) and item.callspec.params.get("script")
        other = isinstance(script, Script) and script != SCRIPTS[0]
        marker = item.get_closest_marker("every_script")
        kept[not other or marker is not None].append(item)
        if other and marker is not None and "slow" in marker.args:
            item.add_marker("slow")
    items[:] = kept[True]
    config.hook.pytest_deselected(items=kept[False])


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
def data(once):
    """A COCO dataset of 18 + 10 small pictures of four classes; one of the training images is a background."""

    def make(folder):
        make_shapes(folder / "shapes", train_images=18, val_images=10, image_size=64)
        path = folder / "shapes" / "annotations" / "train.json"
        document = json.loads(path.read_text())
        background = document["images"][3]["id"]
        for key in ("annotations", "rel_annotations"):
            document[key] = [entry for entry in document[key] if entry["image_id"] != background]
        path.write_text(json.dumps(document))

    return once("data", make) / "shapes"


@pytest.fixture(scope="session")
def settings(script, data):
    """`settings("--run.name x")`, or of a mapping or a list: the script's small settings on `data`; those given win."""

    def build(*args) -> list[str]:
        return small_settings(script, data, args[0] if len(args) == 1 else args)

    return build


@pytest.fixture(scope="session")
def whole(server, script, settings, once):
    """The folder of a run of four steps with nothing left out: two evaluations, report, pictures, final folder."""

    def make(folder):
        steps = "--run.max_steps 4 --run.eval_every 2 --run.save_every 2 --eval.pictures 2"
        args = settings(f"--run.output_dir {folder} {steps}")
        server.run(script, args, whole=True).ok()

    return once(f"whole_{script.name}", make) / "run"


@pytest.fixture(scope="session")
def resumable(server, script, settings, once, tmp_path_factory):
    """`resumable(processes)` -> (arguments but the name, for a folder of their own; folder of an uninterrupted run).

    Six steps over two epochs (three epochs of two steps for three processes): two micro-batches a step, one in the last
    of an epoch; evaluated at 2, 4 and 6, saved at 3, 6 and when better; with all that has a state: workers, dropout,
    flips, a moving average, best and patience.
    """

    def build(processes: int):
        name = f"resumable{processes}_{script.name}"
        batch, eval_batch, epochs = {1: (4, 3, 2), 2: (2, 2, 2), 3: (2, 1, 3)}[processes]
        batches = f"--data.batch_size_per_device {batch} --eval.batch_size_per_device {eval_batch}"
        args = settings(f"{RESUMABLE} {batches} --run.epochs {epochs}")

        def make(folder):
            place = ["--run.output_dir", folder, "--run.name", "reference"]
            rows_of = rows(server.run(script, [*args, *place], processes).ok().folder)
            assert [row["step"] for row in rows_of] == [1, 2, 2, 3, 4, 4, 5, 6, 6]

        reference = once(name, make) / "reference"
        return [*args, "--run.output_dir", str(tmp_path_factory.mktemp(name))], reference

    return build
