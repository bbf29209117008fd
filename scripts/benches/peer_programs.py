"""Trainings of a detector with other programs' loops, as a user would write them; `peers.py` starts each in its own
process.

`python -m benches.peer_programs plan.json` trains for the minutes of the plan, and writes `detections.json` (COCO
results of the validation split) and `trained.json` into the plan's folder. Learning rates depend on the time, while in
the originals they depend on epochs, because the number of steps in these minutes is not known beforehand.
"""

import inspect
import json
import math
import os
import random
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


@dataclass
class PeerPlan:
    """The plan of a training: data (COCO files and folders of images), length, and the folder for the results.

    config: name of our configuration file, without its folder and suffix.
    backbone, backbone_file: timm model in place of the configuration's, and a file of its weights; empty: the
    configuration's with random weights.
    """

    data: str
    config: str
    train: str
    val: str
    train_images: str
    val_images: str
    side: int  # pixels of the squares that images are resized to
    batch: int
    minutes: float
    seed: int
    folder: str
    program: str
    backbone: str = ""
    backbone_file: str = ""


class Clock:
    """A counter of steps and images in a training of a number of minutes, which tells how much of the time has
    passed."""

    def __init__(self, minutes: float):
        self.limit = 60 * minutes
        self.steps = 0
        self.images = 0
        self.began = time.perf_counter()
        self.seconds = 0.0  # from the start to the end of the last step

    @property
    def share(self) -> float:
        """Return the share of the minutes that has passed, 0 to 1."""
        return min(1.0, (time.perf_counter() - self.began) / self.limit)

    def tick(self, images: int) -> None:
        """Count a step that has ended, with this number of images. Print "first step" after the first."""
        self.steps += 1
        self.images += images
        self.seconds = time.perf_counter() - self.began
        if self.steps == 1:
            print("first step", flush=True)

    def result(self) -> dict:
        return {"steps": self.steps, "images": self.images, "seconds": self.seconds}


class PictureDataset(Dataset):
    """Images of a COCO file as squares in memory: (uint8 (side, side, 3), boxes xyxy in pixels, labels from 0)."""

    def __init__(self, annotations: str, folder: str, side: int):
        document = json.loads(Path(annotations).read_text())
        self.images, self.side = document["images"], side
        self.category_ids = sorted(category["id"] for category in document["categories"])
        objects = {image["id"]: [] for image in self.images}
        for each in document["annotations"]:
            objects[each["image_id"]].append((each["bbox"], self.category_ids.index(each["category_id"])))
        self.samples = []
        for image in self.images:
            with Image.open(Path(folder) / image["file_name"]) as picture:
                pixels = np.array(picture.convert("RGB").resize((side, side)))
            boxes = np.array([box for box, _ in objects[image["id"]]], np.float32).reshape(-1, 4)
            boxes[:, 2:] += boxes[:, :2]
            boxes *= np.float32([side / image["width"], side / image["height"]] * 2)
            self.samples.append((pixels, boxes, [label for _, label in objects[image["id"]]]))

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int):
        return self.samples[index]

    def results(self, index: int, boxes_xyxy, scores, labels) -> list[dict]:
        """Convert detections of an image, with boxes in pixels of its square, to COCO results."""
        image = self.images[index]
        scale = torch.tensor([image["width"], image["height"]] * 2) / self.side
        corners = boxes_xyxy.cpu() * scale
        boxes = torch.cat([corners[:, :2], corners[:, 2:] - corners[:, :2]], dim=1).tolist()
        return [
            {"image_id": image["id"], "category_id": self.category_ids[label], "bbox": box, "score": score}
            for box, score, label in zip(boxes, scores.tolist(), labels.tolist(), strict=True)
        ]


class MaskedPictureDataset(PictureDataset):
    """The same with masks: each sample has its objects' pixels, uint8 (N, side, side), as a fourth value."""

    def __init__(self, annotations: str, folder: str, side: int):
        super().__init__(annotations, folder, side)
        from pycocotools.coco import COCO

        with redirect_stdout(sys.stderr):
            truth = COCO(annotations)
        for index, image in enumerate(self.images):
            masks = [
                np.array(Image.fromarray(truth.annToMask(each)).resize((side, side), Image.NEAREST))
                for each in truth.imgToAnns[image["id"]]
            ]
            stacked = np.stack(masks) if masks else np.zeros((0, side, side), np.uint8)
            self.samples[index] = (*self.samples[index], stacked)

    def masks(self, index: int, masks) -> list[dict]:
        """Convert masks (K, 1, side, side) of probabilities to run lengths in the image."""
        from pycocotools import mask as run_lengths

        image = self.images[index]
        size_hw = (image["height"], image["width"])
        pixels = torch.nn.functional.interpolate(masks.float(), size_hw, mode="bilinear")[:, 0] > 0.5
        found = []
        for each in pixels.numpy():
            found.append(run_lengths.encode(np.asfortranarray(each, np.uint8)))
            found[-1]["counts"] = found[-1]["counts"].decode()
        return found


def mirrored_or_not(
    pixels: np.ndarray, boxes: np.ndarray, masks: np.ndarray | None = None
) -> tuple[torch.Tensor, ...]:
    """Mirror an image with its boxes and masks with probability 1/2; return the image uint8 (3, side, side), the boxes
    and, if given, the masks."""
    image, (x1, y1, x2, y2) = torch.tensor(pixels).permute(2, 0, 1), torch.tensor(boxes).T
    mirrors = random.random() < 0.5
    if mirrors:
        image, x1, x2 = image.flip(-1), image.shape[-1] - x2, image.shape[-1] - x1
    boxes = torch.stack([x1, y1, x2, y2], dim=1)
    if masks is None:
        return image, boxes
    return image, boxes, torch.tensor(masks).flip(-1) if mirrors else torch.tensor(masks)


def our_detector(plan: PeerPlan, config: str):
    """Return a detector of this toolkit with random weights, except for those of the plan's backbone, and the settings
    of its configuration file. config: name of this file below `configs/`."""
    import yaml

    from toolkit.models import build_detector

    settings = yaml.safe_load((CONFIGS / f"{config}.yaml").read_text())
    model = dict(settings["model"])
    model["backbone"] = plan.backbone or model["backbone"]
    model["pretrained_backbone"] = plan.backbone_file or False
    names = [each["name"] for each in json.loads(Path(plan.train).read_text())["categories"]]
    return build_detector(model.pop("architecture"), class_names=names, **model), settings


def transformers_trainer(plan: PeerPlan, ours: bool = False) -> tuple[list[dict], Clock]:
    """Train with transformers' Trainer as in its object-detection example: albumentations, AdamW, cosine schedule.

    ours: start from weights that this toolkit draws, with the rates, weight decay and clipping of its configuration.
    """
    import albumentations
    from transformers import (
        AutoModelForObjectDetection,
        RTDetrImageProcessor,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    detector, settings = our_detector(plan, f"detr/{plan.config}")
    model = AutoModelForObjectDetection.from_config(detector.model.config)
    optim, warm_up = {"lr": 5e-5, "weight_decay": 1e-4, "max_norm": 0.1}, 300
    if ours:
        model.load_state_dict(detector.model.state_dict())
        optim, warm_up = settings["optim"], settings["schedule"]["warmup_steps"]
    processor = RTDetrImageProcessor(
        size={"height": plan.side, "width": plan.side},
        do_normalize=bool(plan.backbone_file),  # a trained backbone knows normalised pixels
        image_mean=detector.mean,
        image_std=detector.std,
    )
    augment = albumentations.Compose(
        [
            albumentations.Perspective(p=0.1),
            albumentations.HorizontalFlip(p=0.5),
            albumentations.RandomBrightnessContrast(p=0.5),
            albumentations.HueSaturationValue(p=0.1),
        ],
        bbox_params=albumentations.BboxParams("pascal_voc", label_fields=["labels"], clip=True, min_area=25),
    )
    train, val = (PictureDataset(*split, plan.side) for split in splits(plan))

    def collate(samples: list) -> dict:
        images, annotations = [], []
        for number, (pixels, boxes, labels) in enumerate(samples):
            changed = augment(image=pixels, bboxes=boxes, labels=labels)
            images.append(changed["image"])
            objects = []
            for (x1, y1, x2, y2), label in zip(changed["bboxes"], changed["labels"], strict=True):
                box = {"bbox": [x1, y1, x2 - x1, y2 - y1], "area": (x2 - x1) * (y2 - y1), "iscrowd": 0}
                objects.append(box | {"category_id": int(label)})
            annotations.append({"image_id": number, "annotations": objects})
        batch = processor(images, annotations, return_tensors="pt")
        return {"pixel_values": batch["pixel_values"], "labels": batch["labels"]}

    clock = Clock(plan.minutes)

    class UntilOver(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs) -> None:
            clock.tick(args.per_device_train_batch_size)
            control.should_training_stop = clock.share == 1

    optimizer = torch.optim.AdamW(model.parameters(), lr=optim["lr"], weight_decay=optim["weight_decay"])
    schedule = LambdaLR(optimizer, lambda step: min(1, (step + 1) / warm_up) * cosine(clock.share))
    arguments = TrainingArguments(
        str(Path(plan.folder) / "trainer"), per_device_train_batch_size=plan.batch, max_steps=10**6, seed=plan.seed,
        max_grad_norm=optim["max_norm"], save_strategy="no", report_to="none", remove_unused_columns=False,
        dataloader_num_workers=1, dataloader_persistent_workers=True, disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    Trainer(model, arguments, collate, train, callbacks=[UntilOver()], optimizers=(optimizer, schedule)).train()
    found = []
    model.eval()
    for index, (pixels, _, _) in enumerate(val):
        with torch.no_grad():
            outputs = model(**processor([pixels], return_tensors="pt"))
        best = processor.post_process_object_detection(outputs, 0.0, target_sizes=[(plan.side, plan.side)])[0]
        found += val.results(index, best["boxes"], best["scores"], best["labels"])
    return found, clock


def torchvision_loop(plan: PeerPlan) -> tuple[list[dict], Clock]:
    """Train with torchvision's reference loop: Faster R-CNN with the backbone, anchors, widths and numbers of boxes of
    our configuration; SGD at 0.02 for 16 images, warm-up, a tenth of the rate after 16/26 and 22/26 of the time.
    Mask R-CNN, if our configuration has masks."""
    import yaml
    from torchvision.models.detection import FasterRCNN, MaskRCNN
    from torchvision.models.detection.anchor_utils import AnchorGenerator
    from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
    from torchvision.ops import FeaturePyramidNetwork, MultiScaleRoIAlign
    from torchvision.ops.feature_pyramid_network import LastLevelMaxPool

    from toolkit.models.backbones import timm_model  # timm.create_model, also with the weights of a file

    class Backbone(torch.nn.Module):
        """Maps of strides 4, 8 and 16 of a timm backbone, and a pooled one."""

        def __init__(self, name: str, out_channels: int):
            super().__init__()
            weights = plan.backbone_file or False
            self.body = timm_model(name, weights, features_only=True, out_indices=(1, 2, 3))
            self.fpn = FeaturePyramidNetwork(self.body.feature_info.channels(), out_channels, LastLevelMaxPool())
            self.out_channels = out_channels

        def forward(self, images: torch.Tensor) -> dict:
            return self.fpn({str(level): map_ for level, map_ in enumerate(self.body(images))})

    o = yaml.safe_load((CONFIGS / "faster_rcnn" / f"{plan.config}.yaml").read_text())["model"]
    has_masks = o.get("masks", False)
    dataset = MaskedPictureDataset if has_masks else PictureDataset
    train, val = (dataset(*split, plan.side) for split in splits(plan))
    backbone = Backbone(plan.backbone or o["backbone"], o["fpn_channels"])
    sizes = [*o["anchor_sizes"], [2 * size for size in o["anchor_sizes"][-1]]]
    numbers = [name for name in o if name.startswith(("rpn_p", "rpn_b", "box_"))]
    num_classes = len(train.category_ids) + 1
    mask_branch = {}
    if has_masks:
        mask_branch = {
            "mask_roi_pool": MultiScaleRoIAlign(["0", "1", "2"], 14, 2),
            "mask_head": MaskRCNNHeads(o["fpn_channels"], [o["mask_channels"]] * o["mask_convs"], 1),
        }
    model = (MaskRCNN if has_masks else FasterRCNN)(
        backbone, num_classes=num_classes, min_size=plan.side, max_size=plan.side,
        rpn_anchor_generator=AnchorGenerator(sizes, [o["aspect_ratios"]] * 4),
        box_roi_pool=MultiScaleRoIAlign(["0", "1", "2"], 7, 2), box_score_thresh=0.01,
        **{name: o[name] for name in numbers}, **mask_branch,
    )  # fmt: skip
    if has_masks:
        model.roi_heads.mask_predictor = MaskRCNNPredictor(o["mask_channels"], o["mask_channels"], num_classes)

    def collate(samples: list) -> tuple[list, list]:
        images, targets = [], []
        for pixels, boxes, labels, *masks in samples:
            image, boxes, *masks = mirrored_or_not(pixels, boxes, *masks)
            images.append(image.float() / 255)
            targets.append({"boxes": boxes, "labels": torch.tensor(labels) + 1})
            if masks:
                targets[-1]["masks"] = masks[0]
        return images, targets

    loader = DataLoader(train, plan.batch, True, num_workers=1, collate_fn=collate, drop_last=True,
                        persistent_workers=True)  # fmt: skip
    clock, lr = Clock(plan.minutes), 0.02 * plan.batch / 16
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=1e-4)
    warm_up = min(1000, len(loader) - 1)
    schedule = LambdaLR(optimizer, lambda step: min(1, (step + 1) / warm_up) * 0.1 ** (
        (clock.share > 16 / 26) + (clock.share > 22 / 26)))  # fmt: skip
    model.train()
    while clock.share < 1:
        for images, targets in loader:
            losses = model(images, targets)
            total = sum(losses.values())
            if not math.isfinite(sum(loss.item() for loss in losses.values())):
                raise RuntimeError(f"the loss is {losses}")
            optimizer.zero_grad()
            total.backward()
            optimizer.step()
            schedule.step()
            clock.tick(len(images))
            if clock.share == 1:
                break
    found = []
    model.eval()
    for index, (pixels, *_) in enumerate(val):
        with torch.no_grad():
            best = model([torch.tensor(pixels).permute(2, 0, 1).float() / 255])[0]
        results = val.results(index, best["boxes"], best["scores"], best["labels"] - 1)
        if has_masks:
            for result, mask in zip(results, val.masks(index, best["masks"]), strict=True):
                result["segmentation"] = mask
        found += results
    return found, clock


def detr_engine(plan: PeerPlan) -> tuple[list[dict], Clock]:
    """Train with `engine.py` and the criterion of facebookresearch/detr around our small DETR, with our weights and
    rates, because that repository's own network starts from trained weights that would have to be downloaded."""
    detector, settings = our_detector(plan, "detr/shapes_detr")
    train, val = (PictureDataset(*split, plan.side) for split in splits(plan))
    folder = Path(os.environ["DETR_FOLDER"])
    if not (folder / "engine.py").is_file():
        raise RuntimeError(f"{folder}: git clone https://github.com/facebookresearch/detr into it")
    sys.path.insert(0, str(folder))
    for name in [name for name in sys.modules if name.partition(".")[0] in ("datasets", "models", "util")]:
        del sys.modules[name]  # the packages of that repository have these names
    import torchvision

    torchvision.__version__ = "1.0"  # the repository compares three characters, so that 0.29 would be older than 0.7
    from engine import train_one_epoch
    from models.detr import SetCriterion
    from models.matcher import HungarianMatcher

    class AsTheirs(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.detector = detector

        def forward(self, images: torch.Tensor) -> dict:
            outputs = self.detector(images, torch.tensor([images.shape[-2:]] * len(images)))
            layers = [{"pred_logits": logits, "pred_boxes": boxes}
                      for logits, boxes in zip(outputs["logits"], outputs["boxes"], strict=True)]  # fmt: skip
            return layers[-1] | {"aux_outputs": layers[:-1]}

    def collate(samples: list) -> tuple:
        images, targets = [], []
        for pixels, boxes, labels in samples:
            image, boxes = mirrored_or_not(pixels, boxes)
            images.append(image)
            boxes = torch.cat([(boxes[:, :2] + boxes[:, 2:]) / 2, boxes[:, 2:] - boxes[:, :2]], dim=1)
            targets.append({"boxes": boxes / plan.side, "labels": torch.tensor(labels)})
        return torch.stack(images), targets

    model, optim, schedule = AsTheirs(), settings["optim"], settings["schedule"]
    weights = {"loss_ce": 1.0, "loss_bbox": 5.0, "loss_giou": 2.0} | settings["loss"]["weights"]
    weights |= {f"{name}_{i}": weight for name, weight in weights.items()
                for i in range(settings["model"]["decoder_layers"] - 1)}  # fmt: skip
    eos_coef, terms = settings["model"]["eos_coef"], ["labels", "boxes", "cardinality"]
    criterion = SetCriterion(len(train.category_ids), HungarianMatcher(1, 5, 2), weights, eos_coef, terms)
    loader = DataLoader(train, plan.batch, True, num_workers=1, collate_fn=collate, drop_last=True,
                        persistent_workers=True)  # fmt: skip
    clock = Clock(plan.minutes)

    class Over(Exception):
        """Raised when the minutes are over."""

    class Optimizer(torch.optim.AdamW):
        def step(self, *arguments) -> None:
            warm = min(1, (clock.steps + 1) / schedule["warmup_steps"])
            self.param_groups[0]["lr"] = optim["lr"] * warm * cosine(clock.share)
            super().step(*arguments)
            clock.tick(plan.batch)
            if clock.share == 1:
                raise Over

    optimizer = Optimizer(model.parameters(), lr=optim["lr"], weight_decay=optim["weight_decay"])
    try:
        while True:
            train_one_epoch(model, criterion, loader, optimizer, torch.device("cpu"), 0, 0.1)
    except Over:
        pass
    found = []
    model.eval()
    for index, (pixels, _, _) in enumerate(val):
        with torch.no_grad():
            outputs = model(torch.tensor(pixels).permute(2, 0, 1)[None])
        scores, labels = outputs["pred_logits"][0].softmax(-1)[:, :-1].max(-1)  # as in its PostProcess
        centre, size = outputs["pred_boxes"][0].split(2, dim=1)
        found += val.results(index, plan.side * torch.cat([centre - size / 2, centre + size / 2], 1), scores, labels)
    return found, clock


def cosine(share: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * share))


def splits(plan: PeerPlan) -> tuple[tuple[str, str], tuple[str, str]]:
    return (plan.train, plan.train_images), (plan.val, plan.val_images)


def with_ours(plan: PeerPlan) -> tuple[list[dict], Clock]:
    return transformers_trainer(plan, ours=True)


PROGRAMS = {
    "transformers' Trainer": transformers_trainer,
    "transformers' Trainer, our weights and rates": with_ours,
    "torchvision's reference loop": torchvision_loop,
    "facebookresearch/detr, our weights and rates": detr_engine,
}


def lines_of(program: Callable) -> int:
    """Count the lines of code of a program and of the data set that it reads, without blank lines, comments and
    docstrings."""
    program = transformers_trainer if program is with_ours else program
    lines = [
        line.strip()
        for part in (program, PictureDataset, mirrored_or_not)
        for line in inspect.getsource(part).splitlines()
    ]
    return sum(bool(line) and not line.startswith(("#", '"""')) for line in lines)


def main(path: Path) -> None:
    plan = PeerPlan(**json.loads(path.read_text()))
    torch.manual_seed(plan.seed)
    random.seed(plan.seed)
    found, clock = PROGRAMS[plan.program](plan)
    (path.parent / "detections.json").write_text(json.dumps(found))
    (path.parent / "trained.json").write_text(json.dumps(clock.result()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
