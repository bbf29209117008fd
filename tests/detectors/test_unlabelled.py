"""Images that do not label all classes: no loss of any detector makes an unlabelled class less likely there."""

import pytest
import torch
import torch.nn.functional as F
from class_gradients import class_gradients, of_class_1
from small_detectors import CLASSES, MODELS, built
from torch.testing import assert_close

from toolkit.base.errors import BadInput
from toolkit.data.transforms.mixing import join_targets
from toolkit.models.start import check_losses
from toolkit.step.losses import partial_log_softmax

LABELLED = torch.tensor([False, True, False])
SMOOTHED = {"ssd": {"label_smoothing": 0.1}, "yolov3": {"label_smoothing": True}}


@pytest.mark.parametrize("name", MODELS)
def test_no_gradient_pushes_an_unlabelled_class_down(name):
    options = SMOOTHED.get(name, {})
    detector = built(name, **options)
    assert detector.masks_unlabelled
    plain, before = class_gradients(detector, of_class_1(None))
    masked, losses = class_gradients(detector, of_class_1(LABELLED))
    for first, _ in plain:
        assert (first[:, ~LABELLED] > 1e-7).any(), "all are, without the mask"
    for first, second in masked:
        assert (first[:, ~LABELLED] <= 1e-8).all()
        assert (first[:, LABELLED] != 0).any()
        assert (second[:, ~LABELLED] > 1e-7).any(), "where they are labelled they still are"
    assert losses.keys() == before.keys()
    for value in losses.values():
        assert value.isfinite()
    all_labelled = torch.ones(3, dtype=torch.bool)
    full, same = class_gradients(detector, of_class_1(all_labelled))
    assert_close(full, plain)
    assert_close(same, before)


def test_objectness_of_yolo_leaves_out_what_looks_like_an_unlabelled_class():
    detector = built("yolov3")
    batch = of_class_1(LABELLED)
    outputs = detector(batch.images, batch.sizes, batch.targets)
    names = [name for name in outputs if "raw" in name]
    for name in names:
        outputs[name] = outputs[name].detach().requires_grad_()
    denominators = detector.denominators(batch.targets)
    losses, _ = detector.criterion(outputs, batch.targets, denominators)
    losses["loss_obj"].backward()
    by_anchor = (-1, 5 + len(CLASSES))
    for name in names:
        raw = outputs[name]
        rows = raw[0].unflatten(0, by_anchor)
        likely = rows[:, 5:].argmax(1)
        gradients = raw.grad[0].unflatten(0, by_anchor)
        objectness = gradients[:, 4]
        assert (objectness[likely != 1] <= 0).all(), name


def test_the_background_counts_together_with_unlabelled_classes():
    torch.manual_seed(0)
    logits = torch.randn(3, 4)
    labels = torch.tensor([0, 2, 1])
    of_each = torch.tensor([False, True, False, True])
    unlabelled = of_each.expand(3, 4)
    rows = partial_log_softmax(logits, labels, unlabelled, 0)
    first, second, third = logits.softmax(1)
    expected = [
        first[[0, 1, 3]].sum(),
        second[2] / second[[0, 2]].sum(),
        third[1] / third[[0, 1, 2]].sum(),  # of a mosaic
    ]
    found = rows[range(3), labels]
    assert_close(found, torch.stack(expected).log())
    moved_labels = torch.tensor([3, 1, 0])
    last = partial_log_softmax(
        logits.roll(-1, 1),
        moved_labels,
        unlabelled.roll(-1, 1),
        -1,
    )
    assert_close(last.roll(1, 1), rows)
    nothing = torch.zeros(3, 4, dtype=torch.bool)
    all_labelled = partial_log_softmax(logits, labels, nothing, 0)
    loss = F.nll_loss(all_labelled, labels)
    assert_close(loss, F.cross_entropy(logits, labels))


def test_mixed_images_label_what_all_of_them_label():
    first, second = of_class_1(LABELLED).targets
    joined = join_targets([first, second])
    assert joined["labelled"].tolist() == [False, True, False]


def test_detectors_that_do_not_mask_are_refused():
    detector = built("yolov3")
    check_losses(detector, mixup=True, partly_labelled=True)
    detector.masks_unlabelled = False
    detector.weighs_boxes = False
    with pytest.raises(BadInput, match="data.unlisted_classes unknown") as caught:
        check_losses(detector, mixup=True, partly_labelled=True)
    assert len(caught.value.problems) == 2
