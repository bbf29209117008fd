"""What only train_yolov3.py does: mixup and mosaic that end with an epoch, and the export at the end."""

import onnxruntime
import pytest
import torch
from launching import SCRIPTS, assert_same_run, kill, training_rows

YOLOV3 = [script for script in SCRIPTS if script.name == "train_yolov3"]
pytestmark = [pytest.mark.slow, pytest.mark.every_script, pytest.mark.parametrize("script", YOLOV3, indirect=True)]


def test_mixing_ends_with_its_epoch_also_when_resumed(server, script, settings, tmp_path):
    """Two epochs of five steps, the second not mixed; killed in the first, and again one step into the second."""
    args = settings("--run.output_dir", tmp_path, "--data.workers", 2, "--run.eval_every", 0, "--run.save_every", 3,
                    "--run.resume", "latest", "--data.plain_epochs", 1)  # fmt: skip
    reference = server.run(script, [*args, "--run.name", "whole"]).ok().folder
    for _ in range(2):  # at step 5, saved at 3; then at step 8, saved at 6
        assert server.run(script, [*args, "--run.name", "killed"], 1, [kill(5)]).code == -9
    assert_same_run(server.run(script, [*args, "--run.name", "killed"]).ok().folder, reference)

    trained = training_rows(reference)
    mixed = training_rows(server.run(script, [*args, "--run.name", "mixed", "--data.plain_epochs", "0"]).ok().folder)
    assert [row["epoch"] for row in trained] == [0] * 5 + [1] * 5
    assert trained[:5] == mixed[:5]
    assert trained[5]["train/loss"] != mixed[5]["train/loss"]


def test_compiled_it_is_exported_at_the_end(server, script, settings, tmp_path):
    args = settings("--run.output_dir", tmp_path, "--run.epochs", 1, "--optim.compile", "aot_eager",
                    "--run.export", "true")  # fmt: skip
    ended = server.run(script, args, whole=True).ok()
    assert "largest differences from PyTorch on 3 images" in ended.text
    session = onnxruntime.InferenceSession(ended.folder / "final" / "model.onnx")
    images = torch.randint(0, 256, (2, 3, 96, 64), dtype=torch.uint8)
    boxes, scores, labels = session.run(None, {"images": images.numpy()})
    assert boxes.shape == (2, 300, 4) and scores.shape == labels.shape == (2, 300)
