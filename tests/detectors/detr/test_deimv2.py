"""DEIMv2 as its own program has it, which transformers' DEIMv2 is not. Its numbers: tests/promises/test_weights.py."""

from small_detectors import batch_of, predicted, small, wake

from toolkit.detectors.detr.deimv2 import as_its_program_


def test_the_program_computes_something_else_than_transformers():
    detector = wake(small("deimv2"))
    batch = batch_of([0, 0], (64, 64))
    before = predicted(detector, batch)["logits"]
    as_its_program_(detector.model)
    assert (predicted(detector, batch)["logits"] - before).abs().max() > 0.1
