"""The five training scripts are the same text but for what is listed here, each with its reason.

    python -m pytest tests/test_drift.py

Compared are `train_one_epoch`, `build` and `main` with those of train_detr.py, statement by statement.
"""

import ast
import difflib
import re
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
FUNCTIONS = ("train_one_epoch", "build", "main")
OTHERS = sorted(path.stem for path in SCRIPTS.glob("train_*.py") if path.stem != "train_detr")
# reason -> what is added (+) and taken away (-), in the order of the script
ALLOWED: dict[str, dict[str, str]] = {
    "train_faster_rcnn": {
        "Seamless steps its schedule by batch or by epoch": """
            -final_factor=c.schedule.final_factor)
            +final_factor=c.schedule.final_factor
            +every=steps_per_epoch if c.schedule.per == 'epoch' else 1)
        """,
        "and shows losses with momentum": """
            -pictures=c.eval.pictures)
            +pictures=c.eval.pictures
            +meters=Meters({name: MomentumMeter(MOMENTUM) for name in ('loss', *detector.loss_names)}))
        """,
    },
    "train_sgg": {
        "Scene-Graph-Benchmark shows the largest gradients": """
            +if is_time(t.step + 1, config.optim.gradient_table_every):
            +t.say(gradient_table(t.detector.named_parameters(), config.optim.max_norm
            +top=20))
        """,
        "the model is a head on a detector, which has its own start; padded images are its ordinary input": """
            -detector = start_detector(vars(c.model), table.class_names, folder
            -resumed_from=checkpoint and checkpoint.path
            -say=accelerator.print).to(accelerator.device)
            -if detector.fixed_size:
            -loading.check_one_size(detector.stride, [c.data.image_size], c.data.scales)
            +detector = start_scene_graph(vars(c.model), table, folder
            +checkpoint=checkpoint
            +say=accelerator.print)
            +detector = detector.to(accelerator.device)
        """,
        "rates are those of one image in the original": """
            +images = c.data.batch_size_per_device * c.optim.accumulation_steps * accelerator.num_processes
            +scale = images if c.optim.scale_lr_by_images else 1
            +accelerator.print(f'learning rates are multiplied by {scale}: {c.optim.lr * scale:g} with {images} images a step')
            +for group in groups:
            +group['lr'] *= scale
        """,
        "a schedule that goes by the validation": """
            -schedule = Schedule(optimizer, c.schedule.name, total_steps
            +schedule = PlateauSchedule(optimizer
            +gamma=c.schedule.gamma
            +patience=c.schedule.plateau_patience
            +threshold=c.schedule.plateau_threshold
            +cooldown=c.schedule.plateau_cooldown
            +max_decays=c.schedule.max_decays
            +warmup_steps=c.schedule.warmup_steps
            +warmup_start=c.schedule.warmup_factor) if c.schedule.name == 'plateau' else Schedule(optimizer, c.schedule.name, total_steps
        """,
        "recall of relations, not AP": """
            -evaluator=CocoEvaluator(val_table, c.eval.backend)
            +evaluator=detector.make_evaluator(val_table, c.eval.backend, c.eval.protocol, c.eval.zero_shot)
        """,
        "the original may validate before the first step": """
            -if run.eval_only or (is_time(t.step, t.eval_every) and t.evaluated_step != t.step):
            +first = config.eval.before_training and t.step == 0
            +if run.eval_only or ((first or is_time(t.step, t.eval_every)) and t.evaluated_step != t.step):
        """,
    },
    "train_ssd": {
        "CVNets accumulates from an epoch on": """
            -for window in t.windows(config.optim.accumulation_steps):
            +optim = config.optim
            +for window in t.windows(accumulation_at(t.sampler.epoch, optim.accumulation_steps, optim.accumulate_after_epoch)):
            -steps_per_epoch = -(-len(sampler) // c.optim.accumulation_steps)
            -total_steps = min(c.run.epochs * steps_per_epoch, c.run.max_steps or c.run.epochs * steps_per_epoch)
            +all_steps = sampler.steps_in(c.run.epochs, c.optim.accumulation_steps, c.optim.accumulate_after_epoch)
            +steps_per_epoch = max(1, round(all_steps / c.run.epochs))
            +total_steps = min(all_steps, c.run.max_steps or all_steps)
        """,
        "settles batch norms": """
            +if optim.bn_momentum_final is not None:
            +momentum = bn_momentum(t.step, t.total_steps, 0.1, optim.bn_momentum_final, config.schedule.warmup_steps)
            +set_bn_momentum(t.detector, momentum)
        """,
        "weighs its two losses by each other": """
            +t.detector.multibox.balance_losses(reduced)
        """,
        "augments as SSD does, and varies the size of images from batch to batch": """
            -transform = loading.train_transform(**sizes
            -flip=c.data.flip
            -photometric=c.data.photometric)
            -if overfit:
            -transform = loading.val_transform(**sizes)
            +d = c.data if not overfit else SsdDataConfig(image_size=c.data.image_size
            +flip=False)
            +transform = SsdTransform(zoom_out=d.zoom_out
            +iou_crop=d.iou_crop
            +flip=d.flip
            +photometric=d.photometric)
            -loading.check_one_size(detector.stride, [c.data.image_size], c.data.scales)
            +loading.check_one_size(detector.stride, [c.data.image_size, *d.sizes], c.data.scales)
            -cache_images=c.data.cache_images)
            +cache_images=c.data.cache_images
            +sizes=square_sizes(d.sizes, d.image_size))
        """,
        "and has cyclic schedules": """
            -final_factor=c.schedule.final_factor)
            +final_factor=c.schedule.final_factor
            +stairs=c.schedule.stairs
            +cycles=c.schedule.cycles
            +last_cycle=c.schedule.last_cycle)
        """,
    },
    "train_yolov3": {
        "GluonCV mixes images until the last epochs": """
            +if config.data.mixup or config.data.mosaic:
            +steps_per_epoch = -(-len(t.sampler) // config.optim.accumulation_steps)
            +t.loader.dataset.dataset.plan(config.data.plain_epochs, t.total_steps, steps_per_epoch, t.budget)
            +make_dataset=mixing.mixed_dataset(mixup=d.mixup
            +mosaic=d.mosaic))
        """,
        "augments as YOLO does, and varies the size of images from batch to batch": """
            -transform = loading.train_transform(**sizes
            -flip=c.data.flip
            -photometric=c.data.photometric)
            -if overfit:
            -transform = loading.val_transform(**sizes)
            +d = c.data if not overfit else YoloDataConfig(image_size=c.data.image_size
            +flip=False)
            +transform = yolov3_transforms.yolov3_transform(colour=d.photometric
            +zoom=d.zoom
            +flip=d.flip)
            -loading.check_one_size(detector.stride, [c.data.image_size], c.data.scales)
            +loading.check_one_size(detector.stride, [c.data.image_size, *d.multi_scale], c.data.scales)
            -cache_images=c.data.cache_images)
            +cache_images=c.data.cache_images
            +sizes=variable_batches.VariableSizes(tuple(((side, side) for side in d.multi_scale or [d.image_size]))
            +every=10)
        """,
        "exports at the end": """
            +if run.export:
            +t.detector.export(folder / 'final', next(iter(t.val_loader)).images[:4], t.say)
        """,
    },
}  # fmt: skip


def pieces(script: str, function: str) -> list[str]:
    """A function without its docstring: statements, the keyword arguments of a call each on its own."""
    tree = ast.parse((SCRIPTS / f"{script}.py").read_text())
    node = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function)
    node.body = node.body[1:] if ast.get_docstring(node) else node.body
    return [part.strip() for line in ast.unparse(node).splitlines() for part in re.split(r", (?=\w+=)", line)]


def differences(script: str) -> list[str]:
    found = []
    for function in FUNCTIONS:
        diff = difflib.unified_diff(pieces("train_detr", function), pieces(script, function), n=0, lineterm="")
        found += [line for line in diff if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    return found


@pytest.mark.parametrize("script", OTHERS)
def test_a_script_differs_from_the_first_only_where_it_says_why(script):
    allowed = [line.strip() for text in ALLOWED.get(script, {}).values() for line in text.splitlines() if line.strip()]
    assert sorted(differences(script)) == sorted(allowed), "\n".join(differences(script))


def test_a_line_more_or_less_would_be_noticed(tmp_path, monkeypatch):
    source = (SCRIPTS / "train_detr.py").read_text()
    changed = source.replace("        t.optimizer.zero_grad()\n", "", 1)
    changed = changed.replace("        t.step += 1\n", "        t.step += 2\n", 1)
    (tmp_path / "train_detr.py").write_text(source)
    (tmp_path / "train_other.py").write_text(changed)
    monkeypatch.setattr(f"{__name__}.SCRIPTS", tmp_path)
    assert differences("train_other") == ["-t.optimizer.zero_grad()", "-t.step += 1", "+t.step += 2"]
