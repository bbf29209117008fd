"""Other loops, on the model, batches, precision and rate of a training of ours; `t` is its `Training` throughout."""

from typing import Any

import torch
from torch import Tensor, nn

from .trainings import Driven


def torchvision_loop(t: Any, driven: Driven) -> None:
    """Train as torchvision's references do: its model and losses, all of them read for the log in every step.

    Batches are copied as ours are, as whole uint8 batches from page-locked memory, and become floats on the GPU; the
    references make floats of each image in the workers, and copy four times the bytes.
    """
    from torchvision.models.detection import FasterRCNN
    from torchvision.models.detection.backbone_utils import resnet_fpn_backbone
    from torchvision.ops import FrozenBatchNorm2d

    frozen = {"norm_layer": FrozenBatchNorm2d, "trainable_layers": 3}
    backbone = resnet_fpn_backbone(backbone_name="resnet50", weights=None, **frozen)
    device = t.accelerator.device
    count = len(t.data.tables["training"].class_names) + 1
    side = int(next(iter(t.data.loader)).sizes.min())  # ours has resized the images already
    model = FasterRCNN(backbone, num_classes=count, min_size=side, max_size=2 * side).to(device).train()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=1e-4, momentum=0.9, weight_decay=1e-4)
    done = 0
    while True:
        for batch in t.data.loader:
            driven.tick(done, len(batch))
            pixels = batch.images.to(device, non_blocking=True)
            sizes = batch.sizes.tolist()
            images = [image[:, :h, :w].float() / 255 for image, (h, w) in zip(pixels, sizes, strict=True)]
            targets = [{"boxes": each["boxes"].to(device), "labels": each["labels"].to(device) + 1}
                       for each in batch.targets]  # fmt: skip
            with t.accelerator.autocast():
                losses = model(images, targets)
                total = sum(losses.values())
            for loss in (total, *losses.values()):
                loss.item()
            optimizer.zero_grad()
            total.backward()
            optimizer.step()
            done += 1
        t.sampler.set_epoch(t.sampler.epoch + 1)


class _FromPixels(nn.Module):
    """transformers' detector on uint8 images, which are normalised on the device as ours are."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor, labels: list[dict]) -> Any:
        return self.model(pixel_values=pixel_values.float() / 255, labels=labels)


def transformers_loop(t: Any, driven: Driven) -> None:
    """Run transformers' Trainer on the model inside ours, with its own losses; batches are uint8 and page-locked."""
    from accelerate.state import AcceleratorState
    from transformers import AutoModelForObjectDetection, Trainer, TrainerCallback, TrainingArguments

    from toolkit.base.box_ops import normalize_boxes, xyxy_to_cxcywh
    from toolkit.data.sampling import SampleKey

    dataset = t.data.loader.dataset.dataset
    batch = len(next(iter(t.data.loader)))

    def collate(keys: list[SampleKey]) -> dict:
        samples = [dataset[key] for key in keys]
        images = torch.stack([image for image, _ in samples])
        size_hw = torch.tensor(images.shape[-2:])
        labels = [
            {"class_labels": target["labels"], "boxes": normalize_boxes(xyxy_to_cxcywh(target["boxes"]), size_hw)}
            for _, target in samples
        ]
        return {"pixel_values": images, "labels": labels}

    class Ticking(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs) -> None:
            driven.tick(state.global_step, args.per_device_train_batch_size)

    bf16 = t.accelerator.mixed_precision == "bf16"
    AcceleratorState._reset_state()  # or it would refuse another precision
    arguments = TrainingArguments(
        str(driven.folder / "trainer"), per_device_train_batch_size=batch, max_steps=10**6, logging_steps=50,
        save_strategy="no", report_to="none", remove_unused_columns=False,
        dataloader_num_workers=t.data.loader.num_workers, max_grad_norm=0.1, learning_rate=1e-4, disable_tqdm=True,
        bf16=bf16,
    )  # fmt: skip
    model = _FromPixels(AutoModelForObjectDetection.from_config(t.detector.model.config))
    keys = [SampleKey(0, index) for index in range(len(dataset))]
    Trainer(model, arguments, collate, keys, callbacks=[Ticking()]).train()


def bare_loop(t: Any, driven: Driven) -> None:
    """Forward, our losses, backward, clipping and a fused AdamW on one batch that stays on the device: what our loop,
    its data included, costs beyond these."""
    device = t.accelerator.device
    batch = next(iter(t.data.loader))
    optimizer = torch.optim.AdamW(t.trained_parameters, lr=1e-4, fused=True)
    counts = t.detector.denominators(batch.targets)  # of targets on the CPU
    batch = batch.to(device)
    denominators = {name: torch.tensor(float(count), device=device) for name, count in counts.items()}
    t.model.train()
    done = 0
    while True:
        driven.tick(done, len(batch))
        optimizer.zero_grad()
        with t.accelerator.autocast():
            outputs = t.model(batch.images, batch.sizes, batch.targets)
        losses, _ = t.detector.criterion(outputs, batch.targets, denominators)
        t.loss_weights.weigh(losses, 0, 1).total.backward()
        torch.nn.utils.clip_grad_norm_(t.trained_parameters, 0.1)
        optimizer.step()
        done += 1
