"""Predictions of a data set with the validation loss, on one and on two ranks."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from pasting_detector import PastingDetector
from processes import run_on_ranks
from torch import nn

from toolkit.base.batch import Batch
from toolkit.base.errors import BadInput
from toolkit.base.masks import bitmap
from toolkit.data.sampling import EvalSampler
from toolkit.detectors.detr.detr_criterion import DetrCriterion
from toolkit.evaluation.predict_dataset import memory_needed, predict_dataset
from toolkit.step.losses import LossWeights

WEIGHTS = {"loss_ce": 1, "loss_bbox": 5, "loss_giou": 2}


class TinyDetector(nn.Module):
    """A detector in small: four queries from the mean colour of the image, with DETR's real criterion."""

    denominator_names = ("boxes", "class_weights")
    metric_names = ("class_error",)
    divided_by = {"loss_ce": "class_weights", "loss_bbox": "boxes", "loss_giou": "boxes"}
    to_keep = staticmethod(dict)

    def __init__(self, num_classes=3):
        super().__init__()
        self.head = nn.Sequential(nn.Linear(3, 16), nn.Dropout(0.5), nn.Tanh())
        self.frozen = nn.BatchNorm1d(16)
        self.classes = nn.Linear(16, 4 * (num_classes + 1))
        self.places = nn.Linear(16, 16)
        self.loss = DetrCriterion(num_classes, num_layers=1)
        self.loss_names = self.loss.loss_names

    def forward(self, images, sizes, targets=None):
        assert not self.training
        assert len(images)  # an empty batch never gets here
        hidden = self.frozen(self.head(images.float().mean((2, 3)) / 255))
        boxes = self.places(hidden).sigmoid()
        return {
            "logits": self.classes(hidden).unflatten(1, (4, -1)),
            "boxes": boxes.unflatten(1, (4, 4)),
        }

    def criterion(self, outputs, targets, denominators):
        return self.loss(outputs["logits"][None], outputs["boxes"][None], targets, denominators)

    def denominators(self, targets):
        return self.loss.denominators(targets, 4)

    def postprocess(self, outputs, sizes, orig_sizes, score_threshold=0.0, top_k=100):
        scores, labels = outputs["logits"].softmax(-1)[..., :-1].max(-1)
        boxes = outputs["boxes"] * orig_sizes[:, [1, 0, 1, 0]][:, None]
        found = []
        for image, keep in enumerate(scores > score_threshold):
            columns = {"boxes": boxes, "scores": scores, "labels": labels}
            found.append({name: column[image][keep] for name, column in columns.items()})
        return found


def tiny_detector(num_classes=3, kind=TinyDetector):
    torch.manual_seed(0)
    detector = kind(num_classes).train()
    detector.frozen.eval()
    return detector


def weights_of(detector):
    return LossWeights(detector.loss_names, {}, WEIGHTS)


def tiny_batches(batch_size, rank=0, world_size=1, num_images=7, num_classes=3, most_boxes=5):
    """The batches of one rank of a dataset of 8 x 8 images: `most_boxes` in the first, then fewer and fewer."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (num_images, 3, 8, 8), dtype=torch.uint8, generator=generator)
    corners = torch.rand(num_images, 5, 2, generator=generator) * 4
    targets = []
    for i in range(num_images):
        count = max(0, most_boxes - i)
        target = {
            "image_id": 7 + 3 * i,
            "boxes": torch.cat([corners[i, :count], corners[i, :count] + 2], 1),
            "labels": torch.arange(count) % num_classes,
            "iscrowd": torch.zeros(count, dtype=torch.int64),
            "size": torch.tensor([8, 8]),
            "orig_size": torch.tensor([480, 640]),
        }
        targets.append(target)
    batches = []
    for keys in EvalSampler(num_images, batch_size, rank, world_size):
        chosen = [key.index for key in keys]
        batches.append(
            Batch(
                images[chosen],
                torch.full((len(chosen), 2), 8),
                [targets[i] for i in chosen],
            )
        )
    return batches


def test_validation_loss_is_that_of_the_dataset_as_one_batch():
    detector = tiny_detector()
    weights = weights_of(detector)
    whole = predict_dataset(detector, tiny_batches(7), "cpu", loss_weights=weights)
    single = predict_dataset(detector, tiny_batches(1), "cpu", loss_weights=weights)
    assert detector.head.training
    assert not detector.frozen.training
    assert whole.interrupted == single.interrupted == 0
    assert list(whole.by_image) == list(single.by_image) == [7 + 3 * i for i in range(7)]
    for found in single.by_image.values():
        assert found["boxes"].shape == (4, 4)
        assert not found["boxes"].requires_grad
    assert single.losses == pytest.approx(whole.losses, rel=1e-6)

    (batch,) = tiny_batches(7)
    with torch.no_grad():
        outputs = detector.eval()(batch.images, batch.sizes)
        losses, metrics = detector.criterion(outputs, batch.targets, detector.denominators(batch.targets))
    weighted = {name: factor * float(losses[name]) for name, factor in WEIGHTS.items()}
    expected = weighted | {"loss": sum(weighted.values())}
    expected |= {f"{name}_unscaled": float(loss) for name, loss in losses.items()}
    expected |= {name: float(total / count) for name, (total, count) in metrics.items()}
    assert single.losses == pytest.approx(expected, rel=1e-6)


def test_losses_without_a_single_box_are_0():
    """They have no denominator to be found."""
    detector = tiny_detector()
    losses = predict_dataset(detector, tiny_batches(1, most_boxes=0), "cpu", loss_weights=weights_of(detector)).losses
    assert losses["loss_bbox"] == losses["loss_giou"] == 0
    assert losses["loss_ce"] > 0
    assert "class_error" not in losses


def test_a_signal_ends_the_evaluation():
    detector = tiny_detector()
    polled = iter([0, 0, 15])
    found = predict_dataset(detector, tiny_batches(1), "cpu", stop=lambda: next(polled))
    assert found[:3] == ({}, {}, 15)
    assert next(polled, None) is None
    assert detector.training


def test_memory_that_runs_out_names_the_batch_and_the_setting(monkeypatch):
    def forward(*given):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(TinyDetector, "forward", forward)
    with pytest.raises(BadInput, match="^out of memory: CUDA out of memory") as raised:
        predict_dataset(tiny_detector(), tiny_batches(3), "cpu")
    said = str(raised.value)
    assert "image ids [7, 10, 13]" in said
    assert "Lower --eval.batch_size_per_device" in said
    assert "--data.batch" not in said


class Long(list):
    def __len__(self):
        return 10**6


def test_memory_is_told_before_it_is_needed():
    said = []
    predict_dataset(tiny_detector(), tiny_batches(3), "cpu", say=said.append)
    assert said == []
    predict_dataset(
        tiny_detector(),
        Long(tiny_batches(3)),
        "cpu",
        description="evaluation at step 9",
        say=said.append,
    )
    (text,) = said
    bytes_of_image = 4 * (4 * 4 + 4 + 8) + 3 * 500  # of four boxes
    assert f"3,000,000 images will take about {bytes_of_image * 3 / 1000:.1f} GB" in text
    assert "at step 9" in text
    items = [(i, {"boxes": torch.zeros(100, 4), "scores": torch.zeros(100)}) for i in range(3)]
    assert memory_needed(items, 1000) == ""
    assert "raise eval.score_threshold" in memory_needed(items, 10**10)


def test_masks_of_a_detector_become_run_lengths(monkeypatch):
    detector = PastingDetector()
    targets = [{"image_id": number, "orig_size": torch.tensor([40, 30 + number])} for number in range(3)]
    batch = Batch(torch.zeros(3, 3, 8, 8, dtype=torch.uint8), torch.full((3, 2), 8), targets)
    monkeypatch.setattr("toolkit.evaluation.predict_dataset.PASTED_BYTES", 40 * 32 * 4)  # four at a time
    found = predict_dataset(detector, [batch], "cpu").by_image
    assert [len(each["masks"]) for each in found.values()] == [0, 3, 6]
    assert detector.pasted == [3, 4, 2]
    for number, each in found.items():
        for mask, probabilities in zip(each["masks"], detector.found[number]["masks"], strict=True):
            assert mask.size_hw == (40, 30 + number)
            assert np.array_equal(bitmap(mask, mask.size_hw)[:2, :2], probabilities > 0.5)
    assert "GB" in memory_needed([(2, found[2])], 10**7)


ON_RANKS = {
    "uneven, one batch empty on one rank": {},
    "one image, nothing on the other rank": {"num_images": 1},
    "one class": {"num_images": 5, "num_classes": 1},
    "no ground truth": {"num_images": 3, "most_boxes": 0},
    "no predictions": {"num_images": 5},
}


def predict_case(case, rank=0, world_size=1, stop=int):
    data = ON_RANKS[case]
    detector = tiny_detector(data.get("num_classes", 3))
    batches = tiny_batches(2, rank, world_size, **data)
    how = {
        "loss_weights": weights_of(detector),
        "score_threshold": float(case == "no predictions"),
        "stop": stop,
    }
    return predict_dataset(detector, batches, "cpu", **how)[:3]


def cases_of_rank():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    results = {case: predict_case(case, rank, world_size) for case in ON_RANKS}
    return results | {"stopped": predict_case("one class", rank, world_size, stop=lambda: 12 * rank)}


def test_two_ranks_give_what_one_gives():
    first, second = run_on_ranks(cases_of_rank, 2)
    assert first.pop("stopped") == second.pop("stopped") == ({}, {}, 12), "a signal on one ends it on both"
    for case in ON_RANKS:
        by_image, losses, _ = predict_case(case)
        assert second[case][0] == {}, "the main process alone looks at them"
        assert first[case][0].keys() == by_image.keys()
        for image_id, expected in by_image.items():
            torch.testing.assert_close(first[case][0][image_id], expected, msg=case)
        assert first[case][1] == second[case][1], case  # to the last bit
        assert first[case][1] == pytest.approx(losses, rel=1e-6), case
        assert any(len(found["scores"]) for found in by_image.values()) == (case != "no predictions")
