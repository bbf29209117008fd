"""The teacher of a distillation."""

from collections.abc import Sequence

from toolkit.base.errors import BadInput
from toolkit.models.detector import Detector
from toolkit.tools.distillation.losses import Distillation
from toolkit.tools.predict.open import open_own_detector


def open_teacher(source: str, student: Detector, class_names: Sequence[str], one_size: bool) -> Distillation:
    """Build the losses of `student` beside the detector of a run, a checkpoint or a `final/` folder.

    class_names: of the data. one_size: all images of a batch have one size, without padding. Raises BadInput as
    `Distillation`; a detector that takes no padding, if batches are padded; a model of transformers.
    """
    opened = open_own_detector(source)
    if opened is None:
        raise BadInput(f"loss.teacher {source}: a model of transformers; give a run of this project or its checkpoint")
    if opened.detector.fixed_size and not one_size:
        raise BadInput(f"loss.teacher {source}: it takes images of one size; leave data.scales out")
    device = next(student.parameters()).device
    names = [category.name for category in opened.categories]
    return Distillation(student, opened.detector.to(device), source, class_names, names).to(device)
