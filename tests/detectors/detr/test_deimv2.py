"""DEIMv2 as its own program has it, which transformers' DEIMv2 is not. Its numbers: tests/promises/test_weights.py."""

import torch
from small_detectors import CATEGORIES, batch_of, small, wake

from toolkit.models.final import load_detector_folder


def test_the_program_s_decoder_is_saved_in_our_own_format(tmp_path):
    detector = wake(small("deimv2", original=True)).eval()
    detector.save_final(tmp_path, CATEGORIES)
    again, _, _ = load_detector_folder(tmp_path)
    of_transformers = small("deimv2").eval()
    of_transformers.load_state_dict(detector.state_dict(), strict=False)
    batch = batch_of([0, 0], (64, 64))
    with torch.no_grad():
        logits = detector(batch.images, batch.sizes)["logits"]
        assert logits.equal(again(batch.images, batch.sizes)["logits"])
        other = of_transformers(batch.images, batch.sizes)["logits"]
    assert (logits - other).abs().max() > 0.1
