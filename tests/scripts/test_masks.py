"""Training with masks: killed and resumed, on two processes, and cut into micro-batches."""

import pytest
from launching import (
    EVALUATION,
    ROOT,
    SCRIPTS,
    Script,
    assert_same_run,
    kill,
    small_settings,
    training_rows,
)

from toolkit.run.metrics_log import read_metrics

MASKS = ("--model.masks", "true", "--model.mask_convs", 1, "--model.mask_channels", 8)


@pytest.fixture(scope="module")
def script() -> Script:
    """Return the script of Faster R-CNN: it alone of the small detectors of these tests can learn masks."""
    return next(script for script in SCRIPTS if script.name == "train_faster_rcnn")


@pytest.fixture(scope="module")
def masked(script, data):
    return small_settings(script, data, (
        *MASKS, "--run.max_steps", 6, "--run.eval_every", 3, "--run.save_every", 2, "--run.epochs", 2,
        "--data.workers", 2, "--run.resume", "latest", "--run.keep", 1, "--eval.pictures", 2))  # fmt: skip


@pytest.mark.slow
def test_a_killed_run_with_masks_goes_on_to_the_bit(server, script, masked, tmp_path):
    for processes in (1, 2):
        place = ["--run.output_dir", tmp_path, "--data.batch_size_per_device", 4 // processes]
        name = f"reference{processes}"
        reference = server.run(script, [*masked, *place, "--run.name", name], processes).ok().folder
        place += ["--run.name", f"killed{processes}"]
        for fault in (kill(5), kill(1, EVALUATION)) if processes == 1 else (kill(5),):
            assert server.run(script, [*masked, *place], processes, [fault]).code == -9
        assert_same_run(server.run(script, [*masked, *place], processes).ok().folder, reference)
        row = training_rows(reference)[-1]
        assert row["train/loss_mask"] > 0


@pytest.mark.parametrize("boxes", [(), ("--data.boxes_from_masks", "true")])
def test_evaluate_py_computes_the_row_of_the_run(server, script, masked, tmp_path, boxes):
    """Metrics of boxes and masks, and the losses, which need the annotated masks."""
    settings = [*masked, *boxes, "--run.max_steps", 3, "--run.output_dir", tmp_path, "--run.name", "run"]
    run = server.run(script, settings).ok().folder
    row = [each for each in read_metrics(run / "metrics.jsonl") if "val/loss" in each][-1]
    numbers = server.run(ROOT / "scripts" / "evaluate.py", [run, "--weights", "model"]).ok().numbers
    known = {name: value for name, value in numbers.items() if f"val/{name}" in row}
    assert {"loss", "loss_mask", "segm_AP", "bbox_AP"} <= known.keys() and known["loss_mask"] > 0
    assert known == {name: row[f"val/{name}"] for name in known}
