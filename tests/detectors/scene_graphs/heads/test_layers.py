"""Running means of heads."""

import torch

from toolkit.detectors.scene_graphs.heads.layers import AVERAGE_RATIO, RunningMean


def test_a_running_mean_moves_once_for_each_image_or_for_the_batch():
    rows = torch.randn(6, 3)
    of_images = RunningMean(3).train()
    of_batch = RunningMean(3).train()
    value = torch.zeros(3)
    for _ in range(2):
        of_images(rows, counts=[1, 0, 3, 2])
        of_batch(rows)
        for image in (rows[:1], rows[1:4], rows[4:]):  # the published loop
            value = value * (1 - AVERAGE_RATIO) + AVERAGE_RATIO * image.mean(0)
    torch.testing.assert_close(of_images.value, value)
    torch.testing.assert_close(of_batch.value, AVERAGE_RATIO * (2 - AVERAGE_RATIO) * rows.mean(0))
