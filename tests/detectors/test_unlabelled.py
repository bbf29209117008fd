"""Images that do not label all classes: no loss of any detector makes an unlabelled class less likely there."""

import pytest
import torch
import torch.nn.functional as F
from class_gradients import class_gradients, of_class_1
from small_detectors import CLASSES, MODELS, built

from toolkit.base.errors import BadInput
from toolkit.data.transforms.mixing import join_targets
from toolkit.models.start import check_losses
from toolkit.step.losses import partial_log_softmax

LABELLED = torch.tensor([False, True, False])
SMOOTHED = {"ssd": {"label_smoothing": 0.1}, "yolov3": {"label_smoothing": True}}


@pytest.mark.parametrize("name", MODELS)
def test_no_gradient_pushes_an_unlabelled_class_down(name):
    detector = built(name, **SMOOTHED.get(name, {}))
    assert detector.masks_unlabelled
    plain, before = class_gradients(detector, of_class_1(None))
    masked, losses = class_gradients(detector, of_class_1(LABELLED))
    for gradient in plain:
        assert (gradient[0, :, ~LABELLED] > 1e-7).any(), "all are, without the mask"
    for gradient in masked:
        assert (gradient[0, :, ~LABELLED] <= 1e-8).all()
        assert (gradient[0, :, LABELLED] != 0).any()
        assert (gradient[1, :, ~LABELLED] > 1e-7).any(), "where they are labelled they still are"
    assert all(value.isfinite() for value in losses.values())
    assert losses.keys() == before.keys()
    full, same = class_gradients(detector, of_class_1(torch.ones(3, dtype=torch.bool)))
    torch.testing.assert_close(full, plain)
    torch.testing.assert_close(same, before)


def test_objectness_of_yolo_leaves_out_what_looks_like_an_unlabelled_class():
    detector = built("yolov3")
    batch = of_class_1(LABELLED)
    outputs = detector(batch.images, batch.sizes, batch.targets)
    names = [name for name in outputs if "raw" in name]
    for name in names:
        outputs[name] = outputs[name].detach().requires_grad_()
    losses, _ = detector.criterion(outputs, batch.targets, detector.denominators(batch.targets))
    losses["loss_obj"].backward()
    for name in names:
        rows = outputs[name][0].unflatten(0, (-1, 5 + len(CLASSES)))
        objectness = outputs[name].grad[0].unflatten(0, (-1, 5 + len(CLASSES)))[:, 4]
        likely = rows[:, 5:].argmax(1)
        assert not (objectness[likely != 1] > 0).any(), name


def test_the_background_counts_together_with_unlabelled_classes():
    torch.manual_seed(0)
    logits = torch.randn(3, 4)
    labels = torch.tensor([0, 2, 1])
    unlabelled = torch.tensor([False, True, False, True]).expand(3, 4)
    p = logits.softmax(1)
    rows = partial_log_softmax(logits, labels, unlabelled, 0)
    expected = torch.stack(
        [
            p[0, 0] + p[0, 1] + p[0, 3],
            p[1, 2] / (p[1, 0] + p[1, 2]),
            p[2, 1] / (p[2, 0] + p[2, 1] + p[2, 2]),  # of a mosaic
        ]
    )
    torch.testing.assert_close(rows[range(3), labels], expected.log())
    last = partial_log_softmax(logits.roll(-1, 1), torch.tensor([3, 1, 0]), unlabelled.roll(-1, 1), -1)
    torch.testing.assert_close(last.roll(1, 1), rows)
    all_labelled = partial_log_softmax(logits, labels, torch.zeros(3, 4, dtype=torch.bool), 0)
    torch.testing.assert_close(F.nll_loss(all_labelled, labels), F.cross_entropy(logits, labels))


def test_mixed_images_label_what_all_of_them_label():
    first, second = of_class_1(LABELLED).targets
    assert join_targets([first, second])["labelled"].tolist() == [False, True, False]


def test_detectors_that_do_not_mask_are_refused():
    detector = built("yolov3")
    check_losses(detector, mixup=True, partly_labelled=True)
    detector.masks_unlabelled = detector.weighs_boxes = False
    with pytest.raises(BadInput, match="data.unlisted_classes unknown") as caught:
        check_losses(detector, mixup=True, partly_labelled=True)
    assert len(caught.value.problems) == 2
