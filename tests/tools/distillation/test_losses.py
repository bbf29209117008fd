"""Distillation from a trained detector: what is learned, from whom, and how a checkpoint knows it."""

import copy
import math

import pytest
import torch
from launching import rows
from pytest import approx
from small_detectors import CLASSES, batch_of, small

from toolkit.base.errors import BadInput
from toolkit.models import build_detector
from toolkit.tools.distillation.losses import (
    DISTILLATION_LOSSES,
    Distillation,
    correlation_loss,
    query_losses,
)
from toolkit.tools.distillation.teacher import open_teacher


def distilled(student: str, teacher: str, classes=CLASSES):
    student = small(student)
    teacher = small(teacher, seed=1)
    distillation = Distillation(student, teacher, "there", CLASSES, classes)
    return student, distillation


def losses_of(student, distillation):
    batch = batch_of((2, 3))
    with distillation.watching(batch):
        student.train()(batch.images, batch.sizes, batch.targets)
        return distillation()


def test_maps_that_are_alike_up_to_scale_and_shift_cost_nothing():
    generator = torch.Generator().manual_seed(0)
    maps = torch.randn(2, 3, 4, 5, generator=generator)
    alike = correlation_loss(maps, 3 * maps + 1)
    assert alike.item() == approx(0, abs=1e-5)
    opposite = correlation_loss(maps, -maps)
    assert opposite.item() == approx(2, abs=1e-5)
    of_each = [correlation_loss(each, each.flip(3)) for each in maps.split(1)]
    together = correlation_loss(maps, maps.flip(3))
    torch.testing.assert_close(together, sum(of_each) / 2)


def test_queries_of_the_same_object_are_compared():
    """In whatever order they come; an object that one of them has no query for counts nothing."""
    target = {
        "boxes": torch.tensor([[0.0, 0, 32, 32], [32, 32, 64, 64]]),
        "labels": torch.tensor([0, 1]),
        "size": torch.tensor([64, 64]),
    }
    targets = [target]
    first = [0.25, 0.25, 0.5, 0.5]
    second = [0.75, 0.75, 0.5, 0.5]
    background = [0.5, 0.5, 1.0, 1.0]
    boxes = torch.tensor([[first, second, background]])
    scores = torch.tensor([[[0.9, 0.1], [0.1, 0.9], [0.2, 0.2]]])
    reversed_boxes = boxes.flip(1)
    sharp = (scores > 0.5).float()
    same = query_losses((sharp, boxes), (sharp.flip(1), reversed_boxes), targets)
    assert not any(same.values())
    moved_boxes = boxes + 0.01
    moved = query_losses((scores, moved_boxes), (scores.flip(1), reversed_boxes), targets)
    assert moved["loss_distill_boxes"].item() == approx(0.04, rel=1e-4)
    first_query = (scores[:, :1], moved_boxes[:, :1])
    one = query_losses(first_query, (scores, boxes), targets)
    assert one["loss_distill_boxes"].item() == approx(0.02, rel=1e-4)


def gradients_of(model) -> list[torch.Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize(("student", "teacher"), [("detr", "detr"), ("rt_detr_v2", "d_fine")])
def test_a_student_learns_and_the_teacher_does_not(student, teacher):
    student, distillation = distilled(student, teacher)
    names = distillation.loss_names
    assert len(names) == 3
    assert list(distillation.default_weights) == names
    assert list(distillation.divided_by) == names
    losses = losses_of(student, distillation)
    assert list(losses) == names
    for loss in losses.values():
        assert 0 < loss < math.inf
    sum(losses.values()).backward()
    gradients = gradients_of(student)
    assert any(gradient.any() for gradient in gradients)
    learned = list(distillation.parameters())
    assert len(gradients_of(distillation)) == len(learned)
    teacher = distillation._both[1]
    assert not teacher.training
    for parameter in teacher.parameters():
        assert not parameter.requires_grad
    (group,) = distillation.parameter_groups(0.1, 0.0)
    assert set(group["params"]) == set(learned)
    for name in student.state_dict():
        assert not name.startswith("distill")
    assert not student._forward_hooks, "hooks last as long as a micro-batch"


def test_what_does_not_fit_is_refused():
    with pytest.raises(BadInput, match=r"classes are \['b'\], those of the data \['circle"):
        distilled("detr", "detr", classes=["b"])
    student = small("detr")
    with pytest.raises(BadInput, match="no such run"):
        open_teacher("/nowhere/at/all", student, CLASSES, True)


def test_a_checkpoint_knows_its_teacher_by_content():
    student, distillation = distilled("detr", "detr")
    state = copy.deepcopy(distillation.state_dict())
    parts = {key.partition(".")[0] for key in state}
    assert parts == {"maps", "_extra_state"}, "and has no weight of it"
    _, again = distilled("detr", "detr")
    again.load_state_dict(state)
    other = small("detr", seed=1)
    with torch.no_grad():
        weight = next(other.parameters())
        weight.add_(1e-3)
    from_other = Distillation(student, other, "elsewhere", CLASSES, CLASSES)
    said = "its weights are not those of there that the checkpoint was trained with"
    with pytest.raises(BadInput, match=said):
        from_other.load_state_dict(state)


def test_detectors_without_queries_learn_the_maps_of_their_strides():
    options = {"class_names": CLASSES, "backbone": "lcnet_035"}
    teacher = build_detector(
        "ssd",
        strides=[8, 16, -1],
        channels=[16] * 3,
        aspect_ratios=[[2]] * 3,
        **options,
    )
    student = build_detector("yolov3", head_channels=[8, 8, 8], **options)
    distillation = Distillation(student, teacher, "there", CLASSES, CLASSES)
    assert distillation.loss_names == ["loss_distill_maps"]
    assert "loss_distill_maps" in DISTILLATION_LOSSES
    assert set(distillation.maps) <= {"8", "16"}
    (loss,) = losses_of(student, distillation).values()
    loss.backward()
    assert 0 < loss < 2
    assert gradients_of(student.backbone)
    with pytest.raises(BadInput, match="it takes sides that are multiples of 32, the detector of 16"):
        Distillation(teacher, student, "there", CLASSES, CLASSES)


def test_a_run_learns_from_another_and_is_evaluated(server, script, settings, whole, tmp_path):
    """An evaluation weighs the losses of the detector only: it runs no teacher."""
    args = settings(f"--run.output_dir {tmp_path} --run.max_steps 1 --loss.teacher {whole}")
    run = server.run(script, args).ok()
    training, evaluation = rows(run.folder)
    assert training["train/loss_distill_maps"] > 0
    assert evaluation["val/loss"] > 0
    assert "val/loss_distill_maps" not in evaluation
