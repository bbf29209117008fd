"""Augmentation policies as data: torchvision's v2 transforms by name, applied to image, boxes and their other columns.

data:
  augment:
    - RandomPhotometricDistort: {p: 0.5}
    - RandomApply: {p: 0.8, transforms: [RandomIoUCrop]}
    - RandomHorizontalFlip
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms import v2

from toolkit.base.batch import Target
from toolkit.base.errors import BadInput
from toolkit.base.files import read_yaml
from toolkit.base.masks import Masks, rles_of
from toolkit.base.text import did_you_mean
from toolkit.data.transforms.geometry import Sample, clip_to_size, keep_boxes

# Transforms of whole batches, or away from uint8 images: the loader and the detector do that.
NOT_HERE = "MixUp CutMix ToTensor PILToTensor ToPILImage ToImage ToPureTensor ToDtype Normalize Transform".split()
NOT_HERE += "ConvertImageDtype ConvertBoundingBoxFormat LinearTransformation FiveCrop TenCrop Lambda".split()
NOT_HERE += ["UniformTemporalSubsample"]
NUM_TRIALS = 8  # images that a transform is tried on


class Policy:
    """`(image, target, generator) -> (image, target)` by a list of v2 transforms.

    Their random numbers follow only from the generator; torch's own state stays as it is. Boxes are clipped to the
    image, and those that become empty are removed; areas shrink with the clipped boxes; labels, crowd flags, attributes
    and relations follow their boxes. Masks are drawn before the transforms, which move their pixels: a polygon has no
    place for what a transform cuts off and a later one, such as a rotation, would bring back.

    then: a transform applied afterwards; it receives further arguments of the call, such as a size.
    """

    def __init__(self, transforms: Sequence[v2.Transform], then: Callable[..., Sample] | None = None):
        self.transforms = list(transforms)
        self.then = then

    def __call__(self, image: Tensor, target: Target, generator: torch.Generator, *size) -> Sample:
        seed = int(torch.randint(2**63 - 1, (), generator=generator))
        size_hw = tuple(image.shape[-2:])
        boxes = tv_tensors.BoundingBoxes(target["boxes"], format="XYXY", canvas_size=size_hw)
        sample = {
            "image": tv_tensors.Image(image),
            "boxes": boxes,
            "labels": torch.arange(len(boxes)),  # rows of the target's boxes
        }
        if "masks" in target:
            sample["masks"] = tv_tensors.Mask(target["masks"].drawn(size_hw))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            for transform in self.transforms:
                sample = transform(sample)
        image, target = _from_v2(sample, target)
        if self.then is None:
            return image, target
        return self.then(image, target, generator, *size)

    def __repr__(self) -> str:
        return f"Policy({self.transforms})"


def policy_of(entries: str | Sequence[Any], then: Callable[..., Sample] | None = None) -> Policy:
    """Build the policy of a list of transforms, or of a YAML file with one, and try it on small images.

    entries: names, or mappings of one name to its arguments; `transforms` among arguments is again such a list.
    then: see `Policy`.

    Raises BadInput, naming each entry: an unknown name, wrong arguments, or a result that is not a uint8 RGB image.
    """
    where = "data.augment"
    if isinstance(entries, str):
        where = f"data.augment {entries}"
        entries = _read_policy(entries)
    if not isinstance(entries, Sequence) or isinstance(entries, str):
        raise BadInput(f"{where}: expected a list of transforms, found {type(entries).__name__}")
    made = []
    faults = []
    for number, entry in enumerate(entries, start=1):
        try:
            transform = _build(entry)
            _try(transform)
            made.append(transform)
        except BadInput as error:
            faults += [f"{where}, entry {number}: {problem}" for problem in error.problems]
    if faults:
        raise BadInput(faults)
    return Policy(made, then)


def _from_v2(sample: Mapping[str, Tensor], target: Target) -> Sample:
    image = sample["image"].as_subclass(Tensor)
    left = sample["labels"]  # rows of the boxes that are left
    height, width = image.shape[-2:]
    boxes = sample["boxes"].as_subclass(Tensor).to(torch.float32)
    boxes = clip_to_size(boxes, height, width)
    keep = torch.zeros(len(target["boxes"]), dtype=torch.bool)
    keep[left] = True
    before = _box_areas(target["boxes"])
    target = keep_boxes({**target, "size": torch.tensor((height, width))}, keep)
    ratio = _box_areas(boxes) / before[left].clamp(min=1e-6)
    target = {**target, "boxes": boxes, "area": target["area"] * ratio}
    if "masks" in target:
        pixels = sample["masks"].as_subclass(Tensor)
        if len(pixels) != len(left):  # not every transform that removes boxes removes their masks
            pixels = pixels[left]
        target["masks"] = Masks.of(rles_of(pixels))
    has_sides = (boxes[:, 2:] > boxes[:, :2]).all(1)
    return image, keep_boxes(target, has_sides)


def _box_areas(boxes_xyxy: Tensor) -> Tensor:
    sides = boxes_xyxy[:, 2:] - boxes_xyxy[:, :2]
    return sides.prod(1)


def _read_policy(path: str) -> Any:
    content = read_yaml(Path(path), f"data.augment {path}")
    if isinstance(content, Mapping) and "augment" in content:
        return content["augment"]
    return content


def _build(entry: Any) -> v2.Transform:
    name = entry
    arguments = {}
    if isinstance(entry, Mapping):
        if len(entry) != 1:
            raise BadInput(f"{dict(entry)}: expected one name with its arguments")
        name, arguments = next(iter(entry.items()))
        arguments = {} if arguments is None else arguments
    transforms = {}
    for member in dir(v2):
        kind = getattr(v2, member)
        is_transform = inspect.isclass(kind) and issubclass(kind, v2.Transform)
        if is_transform and member not in NOT_HERE:
            transforms[member] = kind
    if not isinstance(name, str) or name not in transforms:
        hint = did_you_mean(str(name), transforms, otherwise=f"there are {', '.join(transforms)}")
        raise BadInput(f"{name!r} is not a transform of torchvision.transforms.v2 that can be used here{hint}")
    if not isinstance(arguments, Mapping):
        raise BadInput(f"{name}: expected its arguments by name, such as {{p: 0.5}}; found {arguments!r}")
    if not isinstance(arguments.get("fill", {}), Mapping):  # a colour, which masks must not be filled with
        arguments = {**arguments, "fill": {tv_tensors.Mask: 0, "others": arguments["fill"]}}
    if "transforms" in arguments:
        nested = [_build(inner) for inner in arguments["transforms"]]
        arguments = {**arguments, "transforms": nested}
    try:
        return transforms[name](**arguments)
    except (TypeError, ValueError, AttributeError) as error:
        signature = str(inspect.signature(transforms[name].__init__))
        signature = signature.replace("(self, ", "(")
        raise BadInput(f"{name}: {error}; its arguments are {signature}") from error


def _try(transform: v2.Transform) -> None:
    """Run a transform on small images, with and without boxes."""
    for seed in range(NUM_TRIALS):
        generator = torch.Generator().manual_seed(seed)
        boxes = torch.tensor([[4.0, 4, 30, 40], [20, 10, 60, 44]])[: seed % 3]
        image = torch.randint(0, 256, (3, 48, 64), dtype=torch.uint8, generator=generator)
        target = {
            "boxes": boxes,
            "labels": torch.arange(len(boxes)),
            "area": _box_areas(boxes),
        }
        policy = Policy([transform])
        try:
            out, _ = policy(image, target, generator.manual_seed(seed))
        except (TypeError, ValueError, RuntimeError, NotImplementedError, IndexError, KeyError) as error:
            raise BadInput(f"{transform}: {error}") from error
        if out.dtype != torch.uint8 or out.ndim != 3 or out.shape[0] != 3:
            raise BadInput(f"{transform}: gives {out.dtype} of shape {tuple(out.shape)}; expected uint8 (3, H, W)")
