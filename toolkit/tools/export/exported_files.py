"""Writes and runs exported detectors as files of ONNX, torch.export and OpenVINO.

A runner is a function from images uint8 (B, 3, H, W) to boxes, scores, labels and perhaps masks, as NumPy arrays; see
`toolkit.tools.export.graph.PixelsToBoxes`.
"""

import io
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from toolkit.base.errors import BadInput
from toolkit.base.imports import files_are_trusted, import_extra
from toolkit.base.text import escaped
from toolkit.data.table import Category
from toolkit.models.final import checked_size

Runner = Callable[[np.ndarray], tuple[np.ndarray, ...]]
OUTPUT_NAMES = ("boxes", "scores", "labels")
GRAPH_OUTPUT_NAMES = ("pairs", "predicate_scores", "triplet_scores")  # as well, see `toolkit.tools.export.relations`
# In the metadata of an ONNX file, the extra files of a program, the information of OpenVINO.
METADATA_KEY = "detection_toolkit"
MIN_TOP_K = 300  # detections of an image that a prediction keeps by default


@dataclass
class ExportMetadata:
    """Metadata of an exported detector, written as JSON under `METADATA_KEY`.

    Attributes:
        architecture: name of the detector in this toolkit.
        categories: classes in the order of the labels, with the ids that they have in the training data.
        size: the size to which the user must resize images, bilinear with antialiasing, in the form of transformers'
            processors; None: images keep their size.
        sides: image sides that the file accepts: "any", "multiples" of `stride`, or "fixed": those of `size`.
        stride: see `sides`, in pixels.
        score_threshold: score from which detections are meant to be used.
        top_k: number of rows that the file returns for an image: detections, or relations of a scene graph.
        source: the origin of the detector.
        image: description of the input.
        max_detections: number of detections of an image that an evaluation keeps.
        predicates: names of the predicates of a scene graph; empty for a detector.
        masks: see `toolkit.tools.export.graph.PixelsToBoxes`.
        white: value of 16-bit images that becomes 255 in the input; None: 65535.
    """

    architecture: str
    categories: Sequence[Category]
    size: Mapping[str, int] | None
    sides: str
    stride: int
    score_threshold: float
    top_k: int
    source: str
    image: str = "uint8 (B, 3, H, W), RGB"
    max_detections: int = 100
    predicates: Sequence[str] = ()
    masks: str = ""
    white: int | None = None

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of the file's outputs, in order."""
        if self.masks:
            return (*OUTPUT_NAMES, "masks")
        return (*OUTPUT_NAMES, *GRAPH_OUTPUT_NAMES) if self.predicates else OUTPUT_NAMES

    def to_text(self) -> str:
        """Return the metadata as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str | None, path) -> "ExportMetadata":
        """Parse the metadata from JSON text, None if the exported file has no metadata.

        path: the exported file, for messages. Raises BadInput if this toolkit did not write the metadata.
        """
        try:
            entries = json.loads(text or "")
            entries["categories"] = [Category(entry["id"], str(entry["name"])) for entry in entries["categories"]]
            entries["score_threshold"] = float(entries["score_threshold"])
            entries["max_detections"] = int(entries.get("max_detections", cls.max_detections))
            checked_size(entries["size"])
            return cls(**entries)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise BadInput(
                f"{path}: it does not hold its classes and image size ({METADATA_KEY} in its metadata); give a file "
                "that scripts/export.py wrote"
            ) from error


def write_program(program: torch.export.ExportedProgram, path: Path, about: ExportMetadata) -> None:
    """Write a program of torch.export with its metadata to a `.pt2` file."""
    content = io.BytesIO()
    torch.export.save(program, content, extra_files={METADATA_KEY: about.to_text()})
    write_whole(path, content.getbuffer())


def write_whole(path: Path, content: bytes | memoryview) -> None:
    """Write a file by Python, and remove it again if the disk is full.

    torch's own writer of archives ends the process then (SIGABRT, from the destructor of its stream).
    """
    try:
        path.write_bytes(content)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_onnx(program: torch.export.ExportedProgram, path: Path, about: ExportMetadata) -> None:
    """Write a program of torch.export with its metadata to an ONNX file of opset 18. The program is changed by it."""
    optimizer = import_extra("onnxscript", "onnx", "ONNX files").optimizer
    from toolkit.tools.export.operators import TRANSLATIONS

    names = {"input_names": ["images"], "output_names": list(about.outputs)}
    how = {"dynamo": True, "opset_version": 18, "custom_translation_table": TRANSLATIONS}
    exported = torch.onnx.export(program, **names, **how, verbose=False, optimize=False)
    logging.getLogger("onnxscript").setLevel(logging.ERROR)  # it warns of operators that it does not fold
    # Its patterns are not used: they take a third of the time, do not make the graph faster, and join clamps wrongly.
    optimizer.fold_constants(exported.model)
    optimizer.remove_unused_nodes(exported.model)
    exported.model.metadata_props[METADATA_KEY] = about.to_text()
    write_whole(path, exported.model_proto.SerializeToString())


def write_openvino(
    onnx: Path, path: Path, about: ExportMetadata, calibration: Iterable[np.ndarray] | None = None
) -> None:
    """Convert an ONNX file to OpenVINO: `path` (.xml), and the weights next to it (.bin).

    calibration: batches of images uint8 (B, 3, H, W), by which the network is quantised to int8; None: it is not.
        Everything after the network (decoding, suppression) is never quantised.

    Raises:
        BadInput: a necessary package is not installed, or OpenVINO cannot write the files.
    """
    openvino = import_extra("openvino", "openvino", "OpenVINO files")
    model = openvino.convert_model(onnx)
    if calibration is not None:
        nncf = import_extra("nncf", "openvino", "int8 files")
        nncf.set_log_level(40)  # errors
        batches = list(calibration)
        # Convolutions and matrix products of transformers, but not of boxes, which need a fraction of a pixel.
        mixed = nncf.QuantizationPreset.MIXED
        model = nncf.quantize(
            model,
            nncf.Dataset(batches),
            subset_size=len(batches),
            preset=mixed,
        )
    model.set_rt_info(about.to_text(), [METADATA_KEY])
    try:
        openvino.save_model(model, path, compress_to_fp16=False)
    except RuntimeError as error:
        reason = _first_line(error)
        raise BadInput(f"{path}: OpenVINO cannot write it ({reason}); is there room on that disk (`df -h`)?") from error


def open_exported(path: Path, trusted: bool = False) -> tuple[Runner, ExportMetadata]:
    """Return a runner of an exported file on the CPU, and the file's metadata.

    trusted: this process has written the file, or a person trusts it; a `.pt2`, which can hold code, is loaded only
        then, or if files are trusted in general, see `toolkit.base.imports`.

    Raises:
        BadInput: the file does not exist, was not written by `scripts/export.py`, is a `.pt2` that is not trusted, or
            the package that runs it is not installed.
    """
    path = Path(path)
    if not path.is_file():
        raise BadInput(f"{path}: no such file")
    openers = {".onnx": _open_onnx, ".pt2": _open_program, ".xml": _open_openvino}
    if path.suffix not in openers:
        raise BadInput(f"{path}: {path.suffix} is not an exported detector; expected {', '.join(openers)}")
    # torch.export unpickles, evaluates expressions of the file, calls functions that it names and loads its libraries
    if path.suffix == ".pt2" and not (trusted or files_are_trusted()):
        remedy = "add --trust if you exported it or trust who did, or take the .onnx, which cannot"
        raise BadInput(f"{path}: a .pt2 can run any code when it is opened; {remedy}")
    run, about = openers[path.suffix](path)
    return _held_to(about, run, path), about


def runner_of(module: Callable) -> Runner:
    """Return a runner that calls a PyTorch function or module, which takes and returns CPU tensors."""

    @torch.no_grad()
    def run(images: np.ndarray):
        return tuple(output.numpy() for output in module(torch.from_numpy(images)))

    return run


def _held_to(about: ExportMetadata, run: Runner, path: Path) -> Runner:
    """Wrap a runner so that it raises BadInput for images that the file cannot run on and for outputs of unexpected
    shapes."""

    def checked(images: np.ndarray):
        try:
            outputs = run(images)
            boxes, scores, labels = outputs[:3]
        except Exception as error:  # noqa: BLE001 - three programs that run files, each with errors of its own
            what = f"images {images.dtype} {images.shape}"
            raise BadInput(f"{path}: it does not run on {what}: {_first_line(error)}") from error
        shapes = np.shape(boxes), np.shape(scores), np.shape(labels)
        rows = (len(images), *shapes[2][1:])
        largest = np.max(labels, initial=-1)
        classes = len(about.categories)
        if len(rows) != 2 or shapes != ((*rows, 4), rows, rows) or largest >= classes:
            raise BadInput(
                f"{path}: for {len(images)} images it gives boxes {shapes[0]}, scores {shapes[1]} and labels "
                f"{shapes[2]} up to {largest}; expected (B, K, 4), (B, K) and (B, K) below {classes}"
            )
        _check_relations(path, outputs[3:], rows, about)
        if about.masks and (np.ndim(outputs[3]) != 4 or np.shape(outputs[3])[:2] != rows):
            raise BadInput(f"{path}: its masks are {np.shape(outputs[3])}; expected (B, K, h, w) of its {rows} boxes")
        return outputs

    return checked


def _check_relations(path: Path, relations: Sequence[np.ndarray], rows: tuple[int, ...], about: ExportMetadata) -> None:
    if not about.predicates:
        return
    shapes = [np.shape(column) for column in relations]
    count = shapes[0][1] if len(shapes[0]) > 1 else 0
    expected = [
        (rows[0], count, 2),
        (rows[0], count, len(about.predicates)),
        (rows[0], count),
    ]
    lowest = np.min(relations[0], initial=0)
    highest = np.max(relations[0], initial=0)
    if shapes != expected or not 0 <= lowest <= highest < rows[1]:
        raise BadInput(f"{path}: its relations {shapes} are not {expected} of its {rows[1]} boxes")


def _first_line(error: Exception) -> str:
    first, _, _ = str(error).strip().partition("\n")
    return escaped(first, 300) or type(error).__name__


def _open_onnx(path: Path) -> tuple[Runner, ExportMetadata]:
    onnxruntime = import_extra("onnxruntime", "onnx", "ONNX files")

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3  # errors
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # or its threads occupy the others' cores
    try:
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # noqa: BLE001 - its errors have no common class
        raise BadInput(f"{path}: ONNX Runtime cannot load it: {_first_line(error)}") from error
    about = ExportMetadata.from_text(session.get_modelmeta().custom_metadata_map.get(METADATA_KEY), path)
    return lambda images: tuple(session.run(list(about.outputs), {"images": images})), about


def _open_program(path: Path) -> tuple[Runner, ExportMetadata]:
    from toolkit.tools.export import operators  # noqa: F401 - the program names its operators

    texts = {METADATA_KEY: ""}
    logging.getLogger("torch.export").setLevel(logging.ERROR)  # it logs a traceback of the error that it then raises
    try:
        module = torch.export.load(path, extra_files=texts).module()
    except Exception as error:  # noqa: BLE001 - torch.export raises anything on a changed file
        raise BadInput(f"{path}: torch.export cannot load it: {_first_line(error)}") from error
    return runner_of(module), ExportMetadata.from_text(texts[METADATA_KEY], path)


def _open_openvino(path: Path) -> tuple[Runner, ExportMetadata]:
    openvino = import_extra("openvino", "openvino", "OpenVINO files")
    try:
        model = openvino.Core().read_model(path)
    except RuntimeError as error:
        raise BadInput(f"{path}: OpenVINO cannot load it: {_first_line(error)}") from error
    text = model.get_rt_info([METADATA_KEY]).astype(str) if model.has_rt_info([METADATA_KEY]) else None
    # in float32 also where the processor has half precision
    settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": torch.get_num_threads()}
    compiled = openvino.compile_model(model, "CPU", settings)
    about = ExportMetadata.from_text(text, path)
    return lambda images: tuple(np.array(compiled([images])[name]) for name in about.outputs), about
