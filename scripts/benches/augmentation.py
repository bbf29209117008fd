"""Images per second of one core through the augmentation of each published recipe and of the recipes for own data."""

import dataclasses
import importlib
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import torch
import yaml

from toolkit.data.pipeline import loader_of_settings

from .loading import write_photographs
from .measuring import row

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
CONFIG_NAMES = """detr/detr_r50_coco detr/rtdetr_v2_r18_coco detr/d_fine_s_coco detr/deimv2_s_coco detr/own_data
faster_rcnn/faster_rcnn_r50_fpn_coco faster_rcnn/own_data ssd/mobilevit_s_coco ssd/own_data
yolov3/darknet53_coco yolov3/own_data""".split()


def bench_augmentation(num_images: int = 48, recipes: Iterable[str] = CONFIG_NAMES) -> list[dict]:
    """Measure decoding, augmenting and padding of 640 x 480 JPEGs by processor time. Return rows with `name`, `value`
    and `unit`.

    recipes: names of configurations below `configs/`.
    """
    threads = torch.get_num_threads()
    rows = []
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            table = write_photographs(Path(folder), num_images, 0)
            for recipe in recipes:
                defaults = importlib.import_module(f"train_{recipe.partition('/')[0]}").Config().data
                given = yaml.safe_load((CONFIGS / f"{recipe}.yaml").read_text())["data"]
                settings = dataclasses.replace(defaults, **given)
                settings.workers = 0
                settings.batch_size_per_device = min(8, num_images)
                _, loader = loader_of_settings(table, settings, seed=0, stride=1)
                start = time.process_time()
                count = sum(len(batch.targets) for batch in loader)
                speed = count / (time.process_time() - start)
                rows.append(row(f"augmentation, {recipe}", speed, "images/s/core"))
    finally:
        torch.set_num_threads(threads)
    return rows
