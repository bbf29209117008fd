"""The rows and lines of a run: averages of its epochs."""

from types import SimpleNamespace

import pytest

from toolkit.run.log import Log


@pytest.mark.parametrize(
    ("kind", "kept"),
    [
        ("epoch_median", False),
        ("run_median", True),
        ("momentum", True),
    ],
)
def test_meters_of_an_epoch_begin_anew_those_of_a_run_do_not(kind, kept, capsys):
    rows = []
    log = Log(True, kind, steps_per_epoch=2, log_every=1)
    log.start(SimpleNamespace(log=rows.append), {}, 0, 4)
    for step, images in ((1, 48), (2, 16)):  # as where images are larger, and fewer in a batch
        log.meters.update({"loss": 4.0 * step})
        log.log_step(step, 4, 0, {"train/loss": 4.0 * step}, images)
    log.log_epoch(2, 0)
    log.log_epoch(2, 0)  # once
    assert log.end_epoch() == {"loss": 5.0}
    assert bool(log.meters) is kept
    assert [row["epoch/loss"] for row in rows if "epoch/loss" in row] == [5.0]
    assert capsys.readouterr().out.count("epoch 1 averages  loss 5.00") == 1
