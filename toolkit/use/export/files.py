"""Writes and runs exported detectors: ONNX, torch.export, OpenVINO.

A runner is a function from images uint8 (B, 3, H, W) to boxes, scores and labels, as NumPy arrays; see
`toolkit.use.export.graph.PixelsToBoxes`.
"""

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from toolkit.errors import BadInput
from toolkit.imports import import_extra
from toolkit.text import escaped
from toolkit.trust import files_are_trusted
from toolkit.use.export.about import KEY, About

Runner = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray, np.ndarray]]
OUTPUTS = ("boxes", "scores", "labels")
OPSET = 18


def write_program(program: torch.export.ExportedProgram, path: Path, about: About) -> None:
    """A `.pt2` of torch.export."""
    torch.export.save(program, path, extra_files={KEY: about.to_text()})


def write_onnx(program: torch.export.ExportedProgram, path: Path, about: About) -> None:
    """One ONNX file of opset 18."""
    optimizer = import_extra("onnxscript", "onnx", "ONNX files").optimizer
    from toolkit.use.export.operators import TRANSLATIONS

    exported = torch.onnx.export(
        program, dynamo=True, opset_version=OPSET, input_names=["images"], output_names=list(OUTPUTS),
        custom_translation_table=TRANSLATIONS, verbose=False, optimize=False,
    )  # fmt: skip
    # Not its patterns: a third of the time for a graph that runs as fast, and clamps that it joins wrongly.
    optimizer.fold_constants(exported.model)
    optimizer.remove_unused_nodes(exported.model)
    exported.model.metadata_props[KEY] = about.to_text()
    exported.save(str(path), external_data=False)


def open_file(path: Path, trusted: bool = False) -> tuple[Runner, About]:
    """What runs an exported file on the CPU, and what it says of itself.

    trusted: this process wrote it, or a person said so; see `toolkit.trust`.

    Raises:
        BadInput: no such file, none that `scripts/export.py` wrote, a `.pt2` that nobody trusts, or the program that
            runs it is not installed.
    """
    path = Path(path)
    if not path.is_file():
        raise BadInput(f"{path}: no such file")
    openers = {".onnx": _open_onnx, ".pt2": _open_program, ".xml": _open_openvino}
    if path.suffix not in openers:
        raise BadInput(f"{path}: {path.suffix} is no exported detector; there are {', '.join(openers)}")
    # beside its pickles, torch.export evaluates expressions of the file, calls what it names and loads its libraries
    if path.suffix == ".pt2" and not (trusted or files_are_trusted()):
        raise BadInput(f"{path}: a .pt2 can run any code when it is opened; add --trust if you exported it or trust "
                       "who did, or take the .onnx, which cannot")  # fmt: skip
    run, about = openers[path.suffix](path)
    return _held_to(about, run, path), about


def _held_to(about: About, run: Runner, path: Path) -> Runner:
    """The runner of a file that may take other images, or give something else, than it says: BadInput then."""

    def checked(images: np.ndarray):
        try:
            boxes, scores, labels = run(images)
        except Exception as error:  # noqa: BLE001 - three programs that run files, each with errors of its own
            raise BadInput(f"{path}: it does not run on images {images.dtype} {images.shape}: "
                           f"{_first_line(error)}") from error  # fmt: skip
        rows = (len(images), *np.shape(labels)[1:])
        same = len(rows) == 2 and (np.shape(boxes), np.shape(scores), np.shape(labels)) == ((*rows, 4), rows, rows)
        if not same or np.max(labels, initial=-1) >= len(about.categories):
            raise BadInput(f"{path}: for {len(images)} images it gives boxes {np.shape(boxes)}, scores "
                           f"{np.shape(scores)} and labels {np.shape(labels)} up to {np.max(labels, initial=-1)}; "
                           f"expected (B, K, 4), (B, K) and (B, K) below {len(about.categories)}")  # fmt: skip
        return boxes, scores, labels

    return checked


def _first_line(error: Exception) -> str:
    return escaped(str(error).strip().partition("\n")[0], 300) or type(error).__name__


def _open_onnx(path: Path) -> tuple[Runner, About]:
    onnxruntime = import_extra("onnxruntime", "onnx", "ONNX files")

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3  # errors
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # or its threads take the others' cores
    try:
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # noqa: BLE001 - its errors have no common class
        raise BadInput(f"{path}: ONNX Runtime cannot load it: {_first_line(error)}") from error
    about = About.from_text(session.get_modelmeta().custom_metadata_map.get(KEY), path)
    return lambda images: tuple(session.run(list(OUTPUTS), {"images": images})), about


def _open_program(path: Path) -> tuple[Runner, About]:
    from toolkit.use.export import operators  # noqa: F401 - the program names its operators

    texts = {KEY: ""}
    logging.getLogger("torch.export").setLevel(logging.ERROR)  # warns with a traceback of what it then raises
    try:
        module = torch.export.load(path, extra_files=texts).module()
    except Exception as error:  # noqa: BLE001 - torch.export raises anything on a changed file
        raise BadInput(f"{path}: torch.export cannot load it: {_first_line(error)}") from error
    about = About.from_text(texts[KEY], path)

    @torch.no_grad()
    def run(images: np.ndarray):
        return tuple(each.numpy() for each in module(torch.from_numpy(images)))

    return run, about


def _open_openvino(path: Path) -> tuple[Runner, About]:
    openvino = import_extra("openvino", "openvino", "OpenVINO files")
    try:
        model = openvino.Core().read_model(path)
    except RuntimeError as error:
        raise BadInput(f"{path}: OpenVINO cannot load it: {_first_line(error)}") from error
    text = model.get_rt_info([KEY]).astype(str) if model.has_rt_info([KEY]) else None
    return openvino_runner(model), About.from_text(text, path)


def openvino_runner(model) -> Runner:
    """Runs a model of OpenVINO, in float32 also where the processor has half precision."""
    compiled = import_extra("openvino", "openvino", "OpenVINO files").compile_model(
        model, "CPU", {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": torch.get_num_threads()}
    )
    return lambda images: tuple(np.array(compiled([images])[name]) for name in OUTPUTS)
