"""Conditional DETR: auxiliary layers go on from the raw state, which transformers' own do not."""

import torch
from small_detectors import batch_of, predicted, small, transformers_labels, wake
from torch.testing import assert_close

from toolkit.base.batch import normalize_images


def test_auxiliary_layers_continue_the_raw_state():
    """With one layer less, the last predictions are those of the auxiliary layer with one layer more, and that layer
    changes nothing about the last one."""
    two = wake(small("conditional_detr")).eval()
    one = small("conditional_detr", decoder_layers=1)
    one.model.load_state_dict({k: v for k, v in two.model.state_dict().items() if "decoder.layers.1" not in k})
    batch = batch_of([1, 1])
    pixels = normalize_images(batch.images, batch.sizes, two.mean, two.std)
    auxiliary = predicted(two, batch)
    last = predicted(one, batch)
    with torch.no_grad():
        right = two.model(pixels)
        two.model.config.auxiliary_loss = True
        wrong = two.model(pixels, labels=transformers_labels(batch.targets))
    assert_close(auxiliary["logits"][0], last["logits"][0])
    assert_close(auxiliary["boxes"][0], last["boxes"][0])
    assert_close(auxiliary["logits"][-1], right.logits)
    assert (wrong.logits - right.logits).abs().max() > 0.01
