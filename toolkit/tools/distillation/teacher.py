"""Opens the teacher of a distillation."""

from collections.abc import Sequence

from toolkit.base.errors import BadInput
from toolkit.models.detector import Detector
from toolkit.tools.distillation.losses import Distillation
from toolkit.tools.predict.open import open_own_detector


def open_teacher(source: str, student: Detector, class_names: Sequence[str], one_size: bool) -> Distillation:
    """Open the teacher and return the losses of distillation from the teacher to `student`.

    Args:
        source: run, checkpoint or `final/` folder of the teacher.
        class_names: names of the classes of the data, in the order of the labels.
        one_size: all images of a batch have the same size, without padding.

    Raises:
        BadInput: the teacher is a model of transformers, or needs images without padding while batches are padded; or
            see `Distillation`.
    """
    opened = open_own_detector(source)
    if opened is None:
        raise BadInput(f"loss.teacher {source}: a model of transformers; give a run of this project or its checkpoint")
    if opened.detector.fixed_size and not one_size:
        raise BadInput(f"loss.teacher {source}: it takes images of one size; leave data.scales out")
    device = next(student.parameters()).device
    names = [category.name for category in opened.categories]
    return Distillation(student, opened.detector.to(device), source, class_names, names).to(device)
