"""Reads files of published weights without running pickled code, and finds their publisher by the names of their
tensors."""

import pickle
import re
import textwrap
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from toolkit import index
from toolkit.base.errors import BadInput
from toolkit.models import build_detector
from toolkit.models.weights.difference import difference
from toolkit.models.weights.names import Description, IncompleteWeights, Publisher

# Keys under which programs save the weights; averaged ones come first.
WEIGHT_KEYS = (
    ("ema", "module"),
    ("ema",),
    ("ema_model",),
    ("model_ema",),
    ("state_dict_ema",),
    ("model",),
    ("state_dict",),
)
KNOWN_PUBLISHERS = (
    "torchvision (fasterrcnn_resnet50_fpn and maskrcnn_resnet50_fpn, their _v2, ssd300_vgg16, "
    "ssdlite320_mobilenet_v3_large), "
    "facebookresearch/detr, Conditional, DAB and Deformable DETR, lyuwenyu/RT-DETR, Peterande/D-FINE, "
    "RT-DETRs/RT-DETRv4, Intellindust-AI-Lab/DEIM, DEIMv2 and EdgeCrafter (ECDet), roboflow/rf-detr, "
    "Atten4Vis/LW-DETR, "
    "maskrcnn-benchmark, Scene-Graph-Benchmark (scene graphs too), Darknet's and GluonCV's YOLOv3"
)


def open_published_weights(path: Path) -> tuple[Description, dict[str, Tensor]]:
    """Read a file of published weights; return the description of its detector, and its tensors under our names.

    If the classes are not those of COCO, Pascal VOC or VG150, their names are read from a file in the same folder with
    the same name and the suffix `.names`, one class per line; those of predicates of scene graphs from a file
    `.predicates`.

    Raises:
        BadInput: the file cannot be read, no known publisher uses the names of its tensors, or tensors of the
            publisher are missing or have another shape.
    """
    state = read_state(path)
    publisher = next((candidate for candidate in publishers() if candidate.recognised(state)), None)
    if publisher is None:
        last = _layer_of_classifier(state)
        if last:
            raise BadInput(
                f"model.pretrained {path}: these are the tensors of a classifier ({last}), not of a detector; give it "
                "as --model.pretrained_backbone"
            )
        some = ", ".join(list(state)[:3])
        raise BadInput(
            f"model.pretrained {path}: its {len(state)} tensors ({some}, ...) do not have the names of a known "
            f"publisher ({KNOWN_PUBLISHERS}). A folder of this toolkit or of transformers is given as a folder"
        )
    try:
        description, tensors = find_description(publisher, state, path.name)
    except IncompleteWeights as error:
        raise BadInput(
            f"model.pretrained {path}: its tensors have the names of {publisher.program}, but it {error}; the file was "
            "cut or changed, or is of another program: give the whole file that the program saved"
        ) from error
    description.class_names = _names_beside(path, ".names", description.class_names)
    if "predicates" in description.options:
        description.options["predicates"] = _names_beside(path, ".predicates", description.options["predicates"])
    return description, tensors


def _layer_of_classifier(state: Mapping[str, Tensor]) -> str:
    """Return the name of the last weights of a classifier of pictures among tensors; "" if these are not of one."""
    name, tensor = [(name, tensor) for name, tensor in state.items() if not name.endswith("bias")][-1]
    is_last = re.fullmatch(r"((fc|head|classifier|last_linear)(\.\w+)*)\.weight", name) is not None
    return name if is_last and tensor.squeeze().ndim == 2 else ""


def publishers() -> Iterator[Publisher]:
    """Yield every publisher of `toolkit.index.PUBLISHERS`, which is loaded only when it is reached."""
    return map(index.load, index.PUBLISHERS)


def find_description(
    publisher: Publisher, state: Mapping[str, Tensor], file: str
) -> tuple[Description, dict[str, Tensor]]:
    """Return the description of the detector that has exactly a publisher's tensors, and these under our names.

    Args:
        state: tensors by the publisher's names.
        file: name of their file.

    Raises:
        IncompleteWeights: a tensor that describes the detector is missing or of another shape; or none of the detectors
            described has exactly these tensors. The message then says how they differ from the most similar one.
        BadInput: the file is of a variant that this toolkit does not have.
    """
    descriptions = publisher.described(state, file)
    tensors = publisher.ours_from(state)
    differences = []
    for description in descriptions:
        if not description.class_names:
            raise IncompleteWeights("has no rows of classes in its classifier")
        found = difference(_state_of(description), tensors, publisher.optional, description.needless)
        if not found:
            return description, tensors
        differences.append(found)
    closest = min(range(len(differences)), key=lambda number: len(differences[number]))
    detector = descriptions[closest]
    what = f"has other tensors than {detector.architecture}"
    if detector.variant:
        what = f"is none of the published sizes of {detector.architecture}; the most similar is {detector.variant}"
    raise IncompleteWeights(f"{what} (by our names: {differences[closest]})")


def _state_of(description: Description) -> dict[str, Tensor]:
    """Return the state dict of a detector without values, only shapes. The generators of random numbers do not move."""
    options = {"pretrained_backbone": False, **description.options}
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            detector = build_detector(description.architecture, class_names=description.class_names, **options)
    except (ValueError, RuntimeError, ArithmeticError, LookupError) as error:
        first = str(error).partition("\n")[0]
        raise IncompleteWeights(f"has shapes of which no {description.architecture} can be built ({first})") from error
    return detector.state_dict()


def _names_beside(path: Path, suffix: str, known: list[str]) -> list[str]:
    """Return the lines of the file with `suffix` next to `path`; without such a file, the known names.

    Raises BadInput if the file is not a text in UTF-8, or the numbers of names differ.
    """
    file = path.with_suffix(suffix)
    if not file.is_file():
        return known
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        where = f"{error.reason} at byte {error.start}"
        raise BadInput(f"{file}: not a text in UTF-8 ({where}); save it as UTF-8") from error
    names = [line.strip() for line in lines if line.strip()]
    if len(names) != len(known):
        what = "classes" if suffix == ".names" else "predicates"
        raise BadInput(f"{file}: {len(names)} names, but {path.name} has {len(known)} {what}")
    return names


def read_state(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a file by name; if a checkpoint holds raw and averaged (EMA) weights, the averaged ones.

    Raises:
        BadInput: the kind of the file is unknown, it is damaged, or it holds Python objects other than tensors.
    """
    ending = ".weights" if ".conv." in path.name else path.suffix.lower()  # Darknet's backbones: darknet53.conv.74
    if ending in index.WEIGHT_FILES:
        return index.load(index.WEIGHT_FILES[ending])(path)
    return read_tensors(path, "model.pretrained")


def read_tensors(path: Path, setting: str) -> dict[str, Tensor]:
    """Read the tensors of a file of safetensors or PyTorch by name; see `read_state`.

    setting: key of the setting that names the file, for messages.
    """
    if path.suffix.lower() == ".safetensors":
        try:
            return load_file(path)
        except (SafetensorError, OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
            raise BadInput(f"{setting} {path}: not a safetensors file: {error}") from error
    try:
        with torch.serialization.safe_globals([Namespace, SimpleNamespace]):  # flags, which relatives of DETR save
            document = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, OSError, EOFError, ValueError, LookupError) as error:
        lines = str(error).splitlines() or ["it is empty"]
        reason = textwrap.shorten(lines[0], 120, placeholder=" ...")
        if isinstance(error, pickle.UnpicklingError) and _looks_like_a_save(path):
            raise BadInput(
                f"{setting} {path}: it holds other objects than tensors, which could run code when loaded. "
                "Save only its tensors, with the program that wrote it: torch.save(model.state_dict(), 'file.pth') "
                f"({reason})"
            ) from error
        is_told = isinstance(error, RuntimeError | OSError | EOFError)  # others speak of pickles, or are a bare key
        why = f" ({reason})" if is_told else ""
        raise BadInput(
            f"{setting} {path}: cannot be read as weights of PyTorch{why}; give a file that torch.save or safetensors "
            "wrote"
        ) from error
    return _state_in(document, path, setting)


def _looks_like_a_save(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) in (b"PK", b"\x80\x02")  # of zip archives, and of the pickles that torch.save wrote before


def _state_in(document: object, path: Path, setting: str) -> dict[str, Tensor]:
    for keys in (*WEIGHT_KEYS, ()):
        entry = document
        for key in keys:
            entry = entry.get(key) if isinstance(entry, Mapping) else None
        if not isinstance(entry, Mapping):
            continue
        tensors = {str(name): value for name, value in entry.items() if isinstance(value, Tensor)}
        if tensors:
            wrappers = re.compile(r"^(module\.|_orig_mod\.)*")  # of DistributedDataParallel and torch.compile
            return {wrappers.sub("", name): value for name, value in tensors.items()}
    raise BadInput(f"{setting} {path}: it holds no tensors by name")
