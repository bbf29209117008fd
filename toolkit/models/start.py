"""Builds the initial detector of a run from the settings, loads pretrained weights if any, and freezes parts of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from toolkit.base.distributed import run_on_main, world
from toolkit.base.errors import BadInput
from toolkit.base.files import read_json, write_json
from toolkit.models import DetectorOptions, build_detector
from toolkit.models.detector import Detector
from toolkit.run.open_run import run_folder_of
from toolkit.run.settings_file import PRETRAINED_CONFIG
from toolkit.step.freezing import freeze_prefixes


def start_detector(
    options: DetectorOptions,
    class_names: Sequence[str],
    folder: Path,
    *,
    resumed_from: Path | None,
    say: Callable,
    known: Mapping | None = None,
) -> Detector:
    """Build the initial detector of a run from the settings, load the weights `options.pretrained`, freeze parts of the
    detector, and return it.

    A setting that the user gave overrides the setting of the weights' source, which overrides the published default.
    Only the setting `masks` is never the source's.
    The settings of the source (and `known`) and the names of the given settings are written to
    `<folder>/pretrained_config.json`, so that the detector can be built again from only the run folder. A table of the
    loaded tensors is written to `<folder>/pretrained.txt`.

    Args:
        options: settings of the detector, with `given`, the settings that the user gave.
        class_names: names of the classes in the order of the labels.
        folder: the run folder.
        resumed_from: the checkpoint that the run resumes from, whose weights the caller loads afterwards; the weights
            `options.pretrained` are then not loaded.
        say: a function that prints a text on the main process.
        known: further keyword arguments of `build_detector` that are not settings of the user, such as the names of
            predicates.

    Raises:
        BadInput: the source is not available or does not fit, a prefix matches nothing, or any error of
            `build_detector`.
    """
    name = options.pretrained
    is_main = world()[0] == 0
    given = _given(options)
    source = None
    if name and resumed_from is None:
        # Imported here: a run from random weights needs no readers of weights.
        from toolkit.models.weights.pretrained import load_into, open_for

        source = open_for(options.architecture, name)
    stored = _settings_of_weights(options, source, resumed_from)
    if stored is not None or known:
        stored = {**(stored or {}), **(known or {})}
        if is_main:
            content = {"source": name or "", "options": stored, "given": list(given)}
            write_json(folder / PRETRAINED_CONFIG, content)
    settings = {**(stored or {}), **given, **(known or {}), "architecture": options.architecture}
    if source is not None or resumed_from is not None and stored is not None:
        settings["pretrained_backbone"] = False
    detector = build_detector(**settings, class_names=class_names)
    if source is not None:
        table = load_into(detector, source, class_names, given, options.fresh_prefixes)
        say("\n".join([f"weights of {name}:", *source.notes, table.summary()]))
        if is_main:
            (folder / "pretrained.txt").write_text(f"weights of {name}\n{table.table()}\n", encoding="utf-8")
    freeze_prefixes(detector, options.freeze_prefixes)
    return detector


def _settings_of_weights(options: DetectorOptions, source: Any, resumed_from: Path | None) -> dict | None:
    """Return the settings of the detector that its weights are from; None: they are random.

    source: the opened `options.pretrained`, or None. resumed_from: the checkpoint that has the weights, or None.
    """
    if resumed_from is not None:
        stored = run_on_main(lambda: _stored_options(resumed_from))
    else:
        stored = None if source is None else source.options
    if stored is not None and hasattr(options, "masks"):
        stored["masks"] = options.masks  # not the source's: the data are read with masks or without
    return stored


def check_weights(options: DetectorOptions) -> None:
    """Check that the pretrained weights in the settings are available and fit, before the data are read.

    A detector with these weights is built for one placeholder class, and dropped. The weights of scene graphs depend on
    the data, so only the weights of their backbone are checked.

    Raises BadInput as `start_detector` does.
    """
    if not (options.pretrained or options.pretrained_backbone):
        return
    known = None
    if hasattr(options, "detector_options"):  # a scene graph
        if options.pretrained or options.detector:
            return
        known = {"predicates": ["relation"], "attributes": []}
    with TemporaryDirectory() as folder:
        start_detector(
            options,
            ["object"],
            Path(folder),
            resumed_from=None,
            say=lambda text: None,
            known=known,
        )


def check_losses(detector: Detector, *, mixup: bool, partly_labelled: bool, weighs_classes: bool = False) -> None:
    """Raise BadInput if data or settings need a property that the losses of the detector do not have.

    Args:
        mixup: images are mixed, which needs `weighs_boxes`.
        partly_labelled: some classes are not labelled in some images, which needs `masks_unlabelled`.
        weighs_classes: classes have weights, which needs `weighs_classes` of the detector.
    """
    name = detector.options["architecture"]
    faults = []
    if mixup and not detector.weighs_boxes:
        faults.append(
            f"data.mixup: the losses of {name} do not weight boxes by their image's share; leave it out, or use "
            "data.mosaic"
        )
    if partly_labelled and not detector.masks_unlabelled:
        faults.append(
            f"data.unlisted_classes unknown: the losses of {name} do not leave out classes that a data set does not "
            "label; set it to background if there are no objects of these classes there"
        )
    if weighs_classes and not detector.weighs_classes:
        graphs = "; predicates have model.rare_predicate_power" if hasattr(detector, "predicates") else ""
        faults.append(
            f"loss.class_weights: the losses of {name} do not weight classes; leave it out, or use "
            f"data.repeat_factor, which shows images with rare classes more often{graphs}"
        )
    if faults:
        raise BadInput(faults)


def _given(options: DetectorOptions) -> dict:
    """Return the settings that were given, and those changed afterwards: all that differ from the published values."""
    published = type(options)()
    values = {field.name: getattr(options, field.name) for field in fields(options)}
    changed = {name: value for name, value in values.items() if value != getattr(published, name)}
    return {name: value for name, value in (changed | options.given).items() if value is not None}


def _stored_options(checkpoint: Path) -> dict | None:
    """Return the detector options that a checkpoint's run stored next to its settings; None without such options."""
    try:
        path = run_folder_of(checkpoint) / PRETRAINED_CONFIG
    except BadInput:  # its run folder was removed with its settings: those of this command must fit
        return None
    return read_json(path).get("options") if path.is_file() else None
