"""Images that do not label all classes: no loss of any detector makes an unlabelled class less likely there."""

import pytest
import torch
import torch.nn.functional as F
from small_detectors import CLASSES, batch_of, weighted
from test_contract import MODELS, built

from toolkit.base.errors import BadInput
from toolkit.data.transforms.mixing import join_targets
from toolkit.models.start import check_losses
from toolkit.step.losses import partial_log_softmax

LABELLED = torch.tensor([False, True, False])
SMOOTHED = {"ssd": {"label_smoothing": 0.1}, "yolov3": {"label_smoothing": True}}


def of_class_1(labelled: torch.Tensor | None):
    """A batch whose boxes are all of the one class that the first image labels; the second one labels all."""
    batch = batch_of([3, 2], (64, 64))
    for target in batch.targets:
        target["labels"] = torch.ones_like(target["labels"])
        if labelled is not None:
            target["labelled"] = labelled if target is batch.targets[0] else torch.ones(3, dtype=torch.bool)
    return batch


def class_gradients(detector, batch) -> tuple[list[torch.Tensor], dict]:
    """Gradients (2, N, C), image by image, of the losses with respect to the class logits of all outputs; losses."""
    torch.manual_seed(0)
    outputs = detector(batch.images, batch.sizes, batch.targets)
    outputs = outputs.get("layers", outputs)
    leaves = {
        name: value for name, value in outputs.items() if "logits" in name and name != "rpn_logits" or "raw" in name
    }
    if detector.options["architecture"] == "deformable_detr":
        leaves.pop("encoder_logits", None)  # of objects of any class
    outputs |= {name: value.detach().requires_grad_() for name, value in leaves.items()}
    given = {"layers": outputs} if "denoising" in outputs else outputs
    losses, _ = detector.criterion(given, batch.targets, detector.denominators(batch.targets))
    weighted(detector, losses).backward()
    gradients = []
    for name in leaves:
        gradient = outputs[name].grad
        if "raw" in name:  # (B, A * (5 + C), H, W)
            gradient = gradient.unflatten(1, (-1, 5 + len(CLASSES)))[:, :, 5:].movedim(2, -1)
        elif name == "roi_logits":
            gradient = gradient.unflatten(0, (2, -1))
        if detector.divided_by == "boxes" and name == "logits" and "denoising" not in outputs:
            gradient = gradient.transpose(0, 1)  # (L, B, Q, C)
        elif detector.options["architecture"] == "detr":
            gradient = gradient.transpose(0, 1)
        columns = slice(1, None) if name == "roi_logits" or "anchors" in outputs else slice(len(CLASSES))
        gradients.append(gradient[..., columns].flatten(1, -2))
    if "sizes" in outputs:  # boxes are at some of the levels of YOLOv3
        gradients = [torch.cat(gradients, 1)]
    return gradients, losses


@pytest.mark.parametrize("name", [name for name in MODELS if "stages" not in name])
def test_no_gradient_pushes_an_unlabelled_class_down(name):
    detector = built(name, **SMOOTHED.get(name, {}))
    assert detector.masks_unlabelled
    plain, before = class_gradients(detector, of_class_1(None))
    masked, losses = class_gradients(detector, of_class_1(LABELLED))
    assert all((gradient[0, :, ~LABELLED] > 1e-7).any() for gradient in plain), "all are, without the mask"
    for gradient in masked:
        assert (gradient[0, :, ~LABELLED] <= 1e-8).all() and (gradient[0, :, LABELLED] != 0).any()
        assert (gradient[1, :, ~LABELLED] > 1e-7).any(), "where they are labelled they still are"
    assert all(value.isfinite() for value in losses.values()) and losses.keys() == before.keys()
    full, same = class_gradients(detector, of_class_1(torch.ones(3, dtype=torch.bool)))
    for one, other in zip(plain, full, strict=True):
        torch.testing.assert_close(one, other)
    for key, value in before.items():
        torch.testing.assert_close(same[key], value)


def test_objectness_of_yolo_leaves_out_what_looks_like_an_unlabelled_class():
    detector, batch = built("yolov3"), of_class_1(LABELLED)
    outputs = detector(batch.images, batch.sizes, batch.targets)
    outputs |= {name: value.detach().requires_grad_() for name, value in outputs.items() if "raw" in name}
    losses, _ = detector.criterion(outputs, batch.targets, detector.denominators(batch.targets))
    losses["loss_obj"].backward()
    for name in ("raw_stride32", "raw_stride16", "raw_stride8"):
        rows, gradient = (
            value[0].unflatten(0, (-1, 5 + len(CLASSES))).movedim(1, -1)
            for value in (outputs[name], outputs[name].grad)
        )
        likely = rows[..., 5:].argmax(-1)
        assert not (gradient[..., 4][likely != 1] > 0).any(), name


def test_the_background_counts_together_with_unlabelled_classes():
    torch.manual_seed(0)
    logits, unlabelled = torch.randn(3, 4), torch.tensor([False, True, False, True]).expand(3, 4)
    p = logits.softmax(1)
    rows = partial_log_softmax(logits, torch.tensor([0, 2, 1]), unlabelled, 0)
    assert rows[0, 0] == pytest.approx(float((p[0, 0] + p[0, 1] + p[0, 3]).log()), rel=1e-5)
    assert rows[1, 2] == pytest.approx(float((p[1, 2] / (p[1, 0] + p[1, 2])).log()), rel=1e-5)
    assert rows[2, 1] == pytest.approx(float((p[2, 1] / (p[2, 0] + p[2, 1] + p[2, 2])).log()), rel=1e-5)  # of a mosaic
    last = partial_log_softmax(logits.roll(-1, 1), torch.tensor([3, 1, 0]), unlabelled.roll(-1, 1), -1)
    torch.testing.assert_close(last.roll(1, 1), rows)
    all_labelled = partial_log_softmax(logits, torch.tensor([0, 2, 1]), torch.zeros(3, 4, dtype=torch.bool), 0)
    torch.testing.assert_close(
        F.nll_loss(all_labelled, torch.tensor([0, 2, 1])), F.cross_entropy(logits, torch.tensor([0, 2, 1]))
    )


def test_mixed_images_label_what_all_of_them_label_and_other_detectors_are_refused():
    first, second = of_class_1(LABELLED).targets
    assert join_targets([first, second])["labelled"].tolist() == [False, True, False]
    detector = built("yolov3")
    check_losses(detector, mixup=True, partly_labelled=True)
    detector.masks_unlabelled = detector.weighs_boxes = False
    with pytest.raises(BadInput, match="data.unlisted_classes unknown") as caught:
        check_losses(detector, mixup=True, partly_labelled=True)
    assert len(caught.value.problems) == 2
