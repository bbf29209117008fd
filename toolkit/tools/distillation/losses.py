"""Losses of distillation: a student detector learns the feature maps and predictions of a fixed, trained teacher.

Feature maps: Cao et al., "PKD: general distillation framework for object detectors via Pearson correlation
coefficient", NeurIPS 2022, arXiv 2207.02039. Here a 1 x 1 convolution maps the student's channels to the teacher's, and
means and variances are those of single images, so that accumulated batches give the same losses as one large batch.
Predictions, in the DETR family: the queries of student and teacher that are matched to the same object are compared, as
in the target-aware part of Chang et al., "DETRDistill", ICCV 2023, arXiv 2211.10156.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy, interpolate

from toolkit.base.batch import Batch
from toolkit.base.errors import BadInput
from toolkit.models.detector import Detector, kept_maps

# Losses by name: default weight, and what they are averaged over.
DISTILLATION_LOSSES = {
    "loss_distill_maps": (1.0, "images"),
    "loss_distill_classes": (1.0, "boxes"),
    "loss_distill_boxes": (5.0, "boxes"),
}


class Distillation(nn.Module):
    """The losses of distillation from a teacher to a student.

    Its parameters are 1 x 1 convolutions, which are needed in training only. The state dict has these convolutions and
    a hash of the teacher's weights, but not the weights themselves.

    Args:
        student: the detector that is trained.
        teacher: the trained detector, on the device of the student; its parameters are frozen here.
        source: the origin of the teacher, for messages.
        student_classes, teacher_classes: names of the classes in the order of the labels.

    Raises:
        BadInput: student and teacher have different classes; the teacher cannot process the student's batches; or they
            have neither feature maps of the same stride nor queries to compare.
    """

    def __init__(self, student: Detector, teacher: Detector, source: str, student_classes, teacher_classes):
        super().__init__()
        self._both = student, teacher.requires_grad_(False).eval()  # in a tuple, so that they are not submodules
        self.source = source
        self.digest = state_digest(teacher)
        widths, wanted = (
            {stride: width for tap in each.map_taps() for stride, width in zip(tap.strides, tap.channels, strict=True)}
            for each in self._both
        )
        self.maps = nn.ModuleDict({str(s): nn.Conv2d(widths[s], wanted[s], 1) for s in sorted({*widths} & {*wanted})})
        self.has_queries = all(hasattr(detector, "last_layer") for detector in self._both)
        faults = []
        if list(student_classes) != list(teacher_classes):
            faults.append(f"its classes are {list(teacher_classes)}, those of the data {list(student_classes)}")
        if student.stride % teacher.stride:
            faults.append(f"it takes sides that are multiples of {teacher.stride}, the detector of {student.stride}")
        if not self.maps and not self.has_queries:
            faults.append(f"it has maps of strides {sorted(wanted)}, the detector {sorted(widths)}: none of one stride")
        if faults:
            raise BadInput([f"loss.teacher {source}: {fault}" for fault in faults])
        self._batch = None
        self._outputs = {}
        self._maps = {}

    @property
    def loss_names(self) -> list[str]:
        """The names in `DISTILLATION_LOSSES` that apply to these two detectors."""
        return list(DISTILLATION_LOSSES)[0 if self.maps else 1 : 3 if self.has_queries else 1]

    @property
    def default_weights(self) -> dict[str, float]:
        """The weight of each loss, for those that the settings do not give."""
        return {name: DISTILLATION_LOSSES[name][0] for name in self.loss_names}

    @property
    def divided_by(self) -> dict[str, str]:
        """{name of a loss: "images" or "boxes"}, over which the loss is averaged."""
        return {name: DISTILLATION_LOSSES[name][1] for name in self.loss_names}

    def parameter_groups(self, lr: float, weight_decay: float) -> list[dict]:
        """Return a list with the optimizer's parameter group of the convolutions; an empty list if there are none."""
        named = dict(self.named_parameters())
        group = {"name": "distillation", "params": list(named.values()), "param_names": list(named)}
        return [{**group, "lr": lr, "weight_decay": weight_decay}] if named else []

    def get_extra_state(self) -> dict[str, str]:
        """Return source and hash of the teacher, which a checkpoint keeps in place of its weights."""
        return {"teacher": self.source, "sha256": self.digest}

    def set_extra_state(self, state: Mapping[str, str]) -> None:
        """Check that a checkpoint was trained with this teacher; nothing is set.

        Raises BadInput if the hash of the teacher's weights in the checkpoint differs.
        """
        if state["sha256"] != self.digest:
            raise BadInput(
                f"loss.teacher {self.source}: its weights are not those of {state['teacher']} that the checkpoint was "
                "trained with; put these back, or begin a new run"
            )

    @contextmanager
    def watching(self, batch: Batch) -> Iterator[None]:
        """Record the student's outputs and feature maps during a `with` block, in which `forward` uses them.

        batch: the batch that the student is run on in the block.
        """
        student = self._both[0]
        with kept_maps(student.map_taps() if self.maps else []) as self._maps:
            self._batch = batch
            hook = student.register_forward_hook(self._keep)
            try:
                yield
            finally:
                hook.remove()
                self._batch = None
                self._outputs = {}
                self._maps = {}

    def _keep(self, _, arguments: tuple, outputs: Mapping) -> None:
        self._outputs = outputs

    def forward(self) -> dict[str, Tensor]:
        """Run the teacher on the batch of `watching`, and return the losses by name, in float32.

        They are means over the images or boxes of the batch, see `DISTILLATION_LOSSES`. Outside of `watching`, as in an
        evaluation, there are none.
        """
        if self._batch is None:
            return {}
        student, teacher = self._both
        batch = self._batch
        with torch.autocast(batch.images.device.type, enabled=False):
            with torch.no_grad(), kept_maps(teacher.map_taps() if self.maps else []) as taught:
                outputs = teacher(batch.images, batch.sizes)
            losses = {}
            if self.maps:
                apart = [correlation_loss(self.maps[s](self._maps[int(s)].float()), taught[int(s)]) for s in self.maps]
                losses["loss_distill_maps"] = torch.stack(apart).mean()
            if self.has_queries:
                own = _scores_and_boxes(student, self._outputs)
                theirs = _scores_and_boxes(teacher, outputs)
                losses |= query_losses(own, theirs, batch.targets)
        return losses


def correlation_loss(own: Tensor, taught: Tensor) -> Tensor:
    """Return 1 - Pearson's correlation of two feature maps (B, C, h, w), averaged over images and channels.

    The correlation is computed over the positions of a channel in an image. If the sizes h x w differ, `taught` is
    resized to that of `own`.
    """
    if own.shape != taught.shape:
        taught = interpolate(
            taught.float(),
            own.shape[-2:],
            mode="bilinear",
            align_corners=False,
        )
    own, taught = (maps.float().flatten(2) for maps in (own, taught))
    own, taught = (maps - maps.mean(2, keepdim=True) for maps in (own, taught))
    lengths = own.square().sum(2) * taught.square().sum(2)
    return 1 - ((own * taught).sum(2) / (lengths + 1e-12).sqrt()).mean()


def query_losses(
    own: tuple[Tensor, Tensor],
    theirs: tuple[Tensor, Tensor],
    targets: Sequence[Mapping],
) -> dict[str, Tensor]:
    """Return `loss_distill_classes` (binary cross-entropy of class scores) and `loss_distill_boxes` (L1 distance of
    boxes) between the queries of student and teacher that are matched to the same object.

    Sums are divided by the number of boxes in `targets`.

    Args:
        own, theirs: class scores (B, Q, C) in [0, 1] and boxes (B, Q, 4), cxcywh as fractions of the image, of the
            student and of the teacher, for Q queries; Q may differ.
        targets: one for each image.
    """
    from toolkit.detectors.detr.detr_criterion import pad_targets  # imports scipy, which other detectors do not need

    padded = pad_targets(targets, own[0].device, torch.float32)
    rows, their_rows = (_query_of_each(*predictions, padded) for predictions in (own, theirs))
    image, target = ((rows >= 0) & (their_rows >= 0)).nonzero(as_tuple=True)
    scores, boxes = (part[image, rows[image, target]] for part in own)
    their_scores, their_boxes = (part[image, their_rows[image, target]] for part in theirs)
    count = max(1, sum(len(each["labels"]) for each in targets))
    classes = binary_cross_entropy(
        scores.clamp(0, 1),
        their_scores.clamp(0, 1),
        reduction="sum",
    )
    return {
        "loss_distill_classes": classes / count,
        "loss_distill_boxes": (boxes - their_boxes).abs().sum() / count,
    }


def _scores_and_boxes(detector: Detector, outputs: Mapping) -> tuple[Tensor, Tensor]:
    logits, boxes = detector.last_layer(outputs)
    return detector.class_scores(logits.float()), boxes.float()


@torch.no_grad()
def _query_of_each(scores: Tensor, boxes: Tensor, padded) -> Tensor:
    """Return (B, T): the query that DETR's costs match to each of the T objects of `PaddedTargets`; -1: no query."""
    from toolkit.detectors.detr.detr_criterion import MatchingCosts, assign_queries

    labels = padded.labels[:, None].expand(-1, scores.shape[1], -1)
    found = assign_queries(
        -scores.gather(2, labels)[None],
        boxes[None],
        padded,
        MatchingCosts(),
    )
    queries = torch.full_like(padded.labels, -1)
    queries[found.image, found.target] = found.query
    return queries


def state_digest(module: nn.Module) -> str:
    """Return the SHA-256 of a module's state dict, which does not depend on device and file format."""
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
