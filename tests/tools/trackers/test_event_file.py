"""TensorBoard gets every row once, over a kill and a resume, with pictures, curves and settings."""

import numpy as np
import pytest
from metric_rows import events_of, run_and_resume, scalars


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tensorboard")
    run_and_resume(folder, "tensorboard")
    return folder


def test_every_row_is_there_once(folder):
    found = scalars(folder)
    assert found["train/loss"] == [(step, pytest.approx(1 / step)) for step in range(1, 10)]
    assert found["val/bbox_AP"] == [(5, pytest.approx(0.05)), (9, pytest.approx(0.09))]
    assert "val/AP/ring" not in found
    assert found["best/bbox_AP"][-1] == (9, pytest.approx(0.09))
    assert found["best/step"][-1] == (9, 9)
    assert all(path.is_file() for path in (folder / "tensorboard").iterdir()), "one folder of event files"


def test_pictures_and_curves_are_there_once(folder):
    events = events_of(folder)
    images = [(image.step, image.width, image.height) for image in events.Images("val/predictions")]
    assert images == [(5, 8, 6)]
    assert [len(events.Images(f"val/{name}")) for name in ("f1", "confusion_matrix", "class_AP")] == [1, 1, 1]
    (curve,) = events.Tensors("val/precision_recall/star")  # true and false positives, ..., precision, recall
    values = np.array(curve.tensor_proto.float_val).reshape(6, -1)
    assert values[:, [-1, 64, 10]].T.tolist() == [
        [0, 0, 0, 1, 1, 0],
        [1, 0, 0, 0, 1, 1],
        [1, 1, 0, 0, 0.5, 1],
    ]


def test_settings_are_there(folder):
    from tensorboard.plugins.hparams import plugin_data_pb2

    metadata = events_of(folder).summary_metadata
    plugin = metadata["_hparams_/session_start_info"].plugin_data.content
    settings = plugin_data_pb2.HParamsPluginData.FromString(plugin).session_start_info.hparams
    assert settings["optim.lr"].number_value == 1e-4
    assert settings["data.sizes"].string_value == "[1, 2]"
    assert "_hparams_/session_end_info" in metadata
