"""The micro-batches of an update can be run again, with the same numbers."""

import torch
from small_detectors import batch_of, built

from toolkit.step.losses import LossWeights
from toolkit.step.window import Window


def test_a_window_run_again_has_the_same_losses_and_gradients():
    """Denoising draws random numbers, which are those of the seed, step, rank and micro-batch."""
    detector = built("rt_detr_v2")
    weights = LossWeights(detector.loss_names, {}, detector.default_weights)
    batches = [batch_of([2, 1], (64, 64)), batch_of([3], (64, 64))]
    denominators = [{"boxes": 6.0}] * 2

    def run(**facts) -> tuple[list, torch.Tensor]:
        detector.zero_grad()
        window = Window(batches, denominators, **facts)
        losses = window.run_again(detector, weights)
        return losses, torch.cat([p.grad.flatten() for p in detector.parameters() if p.grad is not None])

    first = run(step=3, seed=5)
    torch.rand(1)
    torch.testing.assert_close(run(step=3, seed=5), first, rtol=0, atol=0)
    others, _ = run(step=4, seed=5)
    assert others[0]["loss_vfl_dn_0"] != first[0][0]["loss_vfl_dn_0"]
    _, scaled = run(step=3, seed=5, scale=4.0)
    torch.testing.assert_close(scaled, 4 * first[1])
