"""Files of published weights: read without unpickling, and recognised by the names of their tensors."""

import pickle
import re
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from toolkit import index
from toolkit.base.errors import BadInput
from toolkit.models.weights.names import Description, Publisher

# Keys under which programs save the weights; averaged ones come first.
INSIDE = (
    ("ema", "module"),
    ("ema",),
    ("ema_model",),
    ("model_ema",),
    ("state_dict_ema",),
    ("model",),
    ("state_dict",),
)
KNOWN = (
    "torchvision (fasterrcnn_resnet50_fpn, its _v2, ssd300_vgg16, ssdlite320_mobilenet_v3_large), "
    "facebookresearch/detr, Conditional, DAB and Deformable DETR, lyuwenyu/RT-DETR, Peterande/D-FINE, "
    "Intellindust-AI-Lab/DEIMv2, roboflow/rf-detr, "
    "maskrcnn-benchmark, Scene-Graph-Benchmark (scene graphs too), Darknet's and GluonCV's YOLOv3"
)


def open_file(path: Path) -> tuple[Description, dict[str, Tensor]]:
    """Read a file of published weights: the description of its detector, and its tensors under our names.

    A file `<the same name>.names` beside it, one class a line, holds the class names if they are not those of COCO,
    Pascal VOC or VG150; for scene graphs a file `.predicates` likewise.

    Raises:
        BadInput: it cannot be read, or no known publisher uses the names of its tensors.
    """
    state = read(path)
    publisher = next((candidate for candidate in publishers() if candidate.recognised(state)), None)
    if publisher is None:
        some = ", ".join(list(state)[:3])
        raise BadInput(
            f"model.pretrained {path}: its {len(state)} tensors ({some}, ...) have the names of no publisher that is "
            f"known: {KNOWN}. A folder of this toolkit or of transformers is given as a folder"
        )
    description = publisher.described(state, path.name)
    description.class_names = _names_beside(path, ".names", description.class_names)
    if "predicates" in description.options:
        description.options["predicates"] = _names_beside(path, ".predicates", description.options["predicates"])
    return description, publisher.ours_from(state)


def publishers() -> Iterator[Publisher | ModuleType]:
    """Load every publisher of `toolkit.index.PUBLISHERS`; a module has the methods of a `Publisher` as functions."""
    return map(index.load, index.PUBLISHERS)


def _names_beside(path: Path, suffix: str, known: list[str]) -> list[str]:
    """Return the lines of the file beside `path`, as many as the known names; without that file, the known names."""
    file = path.with_suffix(suffix)
    if not file.is_file():
        return known
    lines = file.read_text(encoding="utf-8").splitlines()
    names = [line.strip() for line in lines if line.strip()]
    if len(names) != len(known):
        what = "classes" if suffix == ".names" else "predicates"
        raise BadInput(f"{file}: {len(names)} names, but {path.name} has {len(known)} {what}")
    return names


def read(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a file by name; of a checkpoint with several sets of them, the averaged ones.

    Raises:
        BadInput: its kind is not known, it is broken, or it holds objects beside tensors.
    """
    ending = ".weights" if ".conv." in path.name else path.suffix.lower()  # Darknet's backbones: darknet53.conv.74
    if ending in index.WEIGHT_FILES:
        return index.load(index.WEIGHT_FILES[ending])(path)
    return read_tensors(path, "model.pretrained")


def read_tensors(path: Path, setting: str) -> dict[str, Tensor]:
    """Read a file of safetensors or PyTorch, as `read` does. setting: the one that names the file, for messages."""
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
        reason = lines[0][:120]
        if isinstance(error, pickle.UnpicklingError) and _looks_like_a_save(path):
            raise BadInput(
                f"{setting} {path}: it holds objects beside tensors, which would run their program when loaded. "
                "Save its tensors alone, with the program that wrote it: torch.save(model.state_dict(), 'file.pth') "
                f"({reason})"
            ) from error
        raise BadInput(
            f"{setting} {path}: cannot be read as weights of PyTorch ({reason}); give a file that torch.save or "
            "safetensors wrote"
        ) from error
    return _tensors(document, path, setting)


def _looks_like_a_save(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) in (b"PK", b"\x80\x02")  # of zip archives, and of the pickles that torch.save wrote before


def _tensors(document: object, path: Path, setting: str) -> dict[str, Tensor]:
    for keys in (*INSIDE, ()):
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
