"""Predictions of a data set with the validation loss, on one and on two ranks."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from pasting_detector import PastingDetector
from processes import run_on_ranks
from small_detectors import CLASSES, random_images, random_target, small

from toolkit.base.batch import Batch
from toolkit.base.errors import BadInput
from toolkit.base.masks import bitmap
from toolkit.data.batches import collate
from toolkit.data.sampling import EvalSampler
from toolkit.evaluation.predict_dataset import memory_needed, predict_dataset
from toolkit.step.losses import LossWeights


def detector_of(num_classes=3):
    return small("detr", class_names=CLASSES[:num_classes]).train()


def weights_of(detector):
    return LossWeights(detector.loss_names, {}, detector.default_weights)


def batches_of(batch_size, rank=0, world_size=1, num_images=7, num_classes=3, most_boxes=5):
    """The batches of one rank of a dataset: `most_boxes` in the first image, then fewer and fewer."""
    images = random_images([(64, 64)] * num_images)
    samples = []
    for number, image in enumerate(images):
        target = random_target(max(0, most_boxes - number), (64, 64), seed=number)
        target["labels"] %= num_classes
        samples.append((image, target))
    batches = []
    for keys in EvalSampler(num_images, batch_size, rank, world_size):
        batches.append(collate([samples[key.index] for key in keys]))
    return batches


def test_validation_loss_is_that_of_the_dataset_as_one_batch():
    detector = detector_of()
    weights = weights_of(detector)
    detector.model.model.backbone.eval()
    modes = [module.training for module in detector.modules()]
    whole = predict_dataset(detector, batches_of(7), "cpu", loss_weights=weights)
    single = predict_dataset(detector, batches_of(1), "cpu", loss_weights=weights)
    assert [module.training for module in detector.modules()] == modes
    assert whole.interrupted == single.interrupted == 0
    assert list(whole.by_image) == list(single.by_image) == list(range(7))
    for found in single.by_image.values():
        assert found["boxes"].shape == (6, 4)
        assert not found["boxes"].requires_grad
    assert single.losses == pytest.approx(whole.losses, rel=1e-6)

    (batch,) = batches_of(7)
    with torch.no_grad():
        outputs = detector.eval()(batch.images, batch.sizes, batch.targets)
        losses, metrics = detector.criterion(outputs, batch.targets, detector.denominators(batch.targets))
    weighted = weights(losses, 0)
    expected = {name: float(value) for name, value in weighted.weighted.items()}
    expected |= {f"{name}_unscaled": float(loss) for name, loss in losses.items()}
    expected |= {name: float(total / count) for name, (total, count) in metrics.items()}
    assert single.losses == pytest.approx(expected | {"loss": float(weighted.total)}, rel=1e-6)


def test_losses_without_a_single_box_are_0():
    """They have no denominator to be found."""
    detector = detector_of()
    losses = predict_dataset(detector, batches_of(1, most_boxes=0), "cpu", loss_weights=weights_of(detector)).losses
    assert losses["loss_bbox"] == losses["loss_giou"] == 0
    assert losses["loss_ce"] > 0
    assert "class_error" not in losses


def test_a_signal_ends_the_evaluation():
    detector = detector_of()
    polled = iter([0, 0, 15])
    found = predict_dataset(detector, batches_of(1), "cpu", stop=lambda: next(polled))
    assert found[:3] == ({}, {}, 15)
    assert next(polled, None) is None
    assert detector.training


def test_memory_that_runs_out_names_the_batch_and_the_setting(monkeypatch):
    def forward(*given):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    detector = detector_of()
    monkeypatch.setattr(type(detector), "forward", forward)
    with pytest.raises(BadInput, match="^out of memory: CUDA out of memory") as raised:
        predict_dataset(detector, batches_of(3), "cpu")
    said = str(raised.value)
    assert "image ids [0, 1, 2]" in said
    assert "Lower --eval.batch_size_per_device" in said
    assert "--data.batch" not in said


class Long(list):
    def __len__(self):
        return 10**6


def test_memory_is_told_before_it_is_needed():
    said = []
    predict_dataset(detector_of(), batches_of(3), "cpu", say=said.append)
    assert said == []
    predict_dataset(
        detector_of(),
        Long(batches_of(3)),
        "cpu",
        description="evaluation at step 9",
        say=said.append,
    )
    (text,) = said
    bytes_of_image = 6 * (4 * 4 + 4 + 8) + 3 * 500  # of six boxes
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
    detector = detector_of(data.get("num_classes", 3))
    batches = batches_of(2, rank, world_size, **data)
    how = {
        "loss_weights": weights_of(detector),
        "score_threshold": float(case == "no predictions"),
        "stop": stop,
    }
    return predict_dataset(detector, batches, "cpu", **how)[:3]


def cases_of_rank():
    rank = dist.get_rank()
    world_size = dist.get_world_size()
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
