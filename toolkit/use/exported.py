"""An exported detector as a predictor: images of any size in, boxes in their pixels out."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from toolkit.data.transforms.geometry import resize
from toolkit.use.export.about import About
from toolkit.use.export.files import Runner
from toolkit.use.sizes import image_hw, input_hw, of_one_shape

Found = dict[str, Tensor]


def predict_with(run: Runner, about: About):
    """`Predictor.predict` of a runner: see `toolkit.use.prediction.Predictor`."""

    def predict(images: Sequence[Tensor], score_threshold: float) -> list[Found]:
        no_boxes = {"boxes": torch.zeros(0, 4), "area": torch.zeros(0)}
        resized = [resize(image, no_boxes, input_hw(image_hw(image), about.size))[0] for image in images]
        found: list[Found] = [{}] * len(images)
        for group in of_one_shape(resized):
            batch = np.stack([resized[i].contiguous().numpy() for i in group])
            boxes, scores, labels = (torch.from_numpy(np.array(each)) for each in run(batch))
            for row, i in enumerate(group):
                height, width = (new / old for new, old in zip(image_hw(images[i]), batch.shape[-2:], strict=True))
                keep = (labels[row] >= 0) & (scores[row] > score_threshold)
                scale = torch.tensor([width, height, width, height])
                found[i] = {
                    "boxes": boxes[row][keep] * scale, "scores": scores[row][keep], "labels": labels[row][keep].long()
                }  # fmt: skip
        return found

    return predict
