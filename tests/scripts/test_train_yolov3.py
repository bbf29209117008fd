"""What only train_yolov3.py does: mixup and mosaic that end with an epoch, and the export at the end."""

import onnxruntime
import pytest
import torch
from launching import SCRIPTS, small_settings, training_rows

YOLOV3 = SCRIPTS[1]


@pytest.fixture
def settings(data, tmp_path):
    """`settings(...)`: the small settings, those given last."""
    return lambda *given: small_settings(YOLOV3, data, ["--run.output_dir", tmp_path, *given])


@pytest.mark.slow
def test_mixing_ends_with_its_epoch(server, settings):
    """Two epochs of five steps, the second mixed or not."""
    runs = {}
    for name, plain_epochs in (("mixed", 0), ("plain", 1)):
        given = ("--run.name", name, "--data.plain_epochs", plain_epochs, "--run.eval_every", 0)
        runs[name] = training_rows(server.run(YOLOV3, settings(*given)).ok().folder)
    assert [row["epoch"] for row in runs["plain"]] == [0] * 5 + [1] * 5
    assert runs["plain"][:5] == runs["mixed"][:5]
    assert runs["plain"][5]["train/loss"] != runs["mixed"][5]["train/loss"]


@pytest.mark.slow
def test_compiled_it_is_exported_at_the_end(server, settings):
    given = "--run.epochs 1 --run.eval_every 0 --optim.compile aot_eager --run.export true".split()
    ended = server.run(YOLOV3, settings(*given, *YOLOV3.one_size), whole=True, within_s=900).ok()
    assert "largest differences from PyTorch on 3 images" in ended.text
    session = onnxruntime.InferenceSession(ended.folder / "final" / "model.onnx")
    images = torch.randint(0, 256, (2, 3, 96, 64), dtype=torch.uint8)
    boxes, scores, labels = session.run(None, {"images": images.numpy()})
    assert boxes.shape == (2, 300, 4)
    assert scores.shape == labels.shape == (2, 300)
