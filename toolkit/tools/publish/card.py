"""Writes the model card of a `final/` folder: training data and settings, metrics, and how to load the model."""

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from toolkit.base.errors import BadInput
from toolkit.base.files import read_json, read_json_object, write_text_atomic
from toolkit.base.public import without_machine
from toolkit.base.text import as_code, in_markdown
from toolkit.evaluation.shown_metrics import Metric, metrics_of
from toolkit.run.metrics_log import read_metrics
from toolkit.run.settings_file import CONFIG_FILE, read_groups

SHOWN_METRICS = ("AP", "AP50", "AP75", "AR100", "segm_AP", "segm_AP50")
MAX_SHOWN_CLASSES = 100
LICENCE = "apache-2.0"  # the licence of this program; the data may require another
LICENCES_BELOW = (
    "for the weights, as far as the licences of the training data and of the weights that training began with allow "
    "it; check those before you pass the model on."
)
LIMITS_TEXT = (
    "It finds the classes above in images like those of its training data, and nothing else: on other cameras, sizes, "
    "places or times it must be measured again before it is trusted. Scores are not probabilities unless the report's "
    "calibration says so; choose the threshold by the cost of misses and false alarms. It was not made for decisions "
    "about people, nor for uses where a missed object does unnoticed harm."
)
PICTURE = "predictions.png"
TRANSFORMERS_USAGE = """With transformers alone:

```python
from transformers import pipeline

detect = pipeline("object-detection", model="PATH_OR_NAME")
for found in detect("photo.jpg"):
    print(found["label"], found["score"], found["box"])
```"""
TOOLKIT_USAGE = """With the toolkit that trained it:

```python
from PIL import Image
from toolkit import open_predictor

found = open_predictor("PATH")(Image.open("photo.jpg"))
print(found["boxes"], found["scores"], found["labels"])
```"""
TORCHVISION_USAGE = """With torchvision alone; labels count from 1:

```python
from PIL import Image
from safetensors.torch import load_file
from torchvision.models.detection import fasterrcnn_resnet50_fpn_v2
from torchvision.transforms.functional import to_tensor

size = {"min_size": SMALLEST, "max_size": LARGEST}
model = fasterrcnn_resnet50_fpn_v2(weights=None, weights_backbone=None, num_classes=CLASSES, **size)
model.load_state_dict(load_file("PATH/model.safetensors"))
print(model.eval()([to_tensor(Image.open("photo.jpg"))]))
```"""


def write_card(folder: Path, class_names: Sequence[str], licence: str = LICENCE) -> Path:
    """Write the model card `README.md` to a `final/` folder, and return the file.

    The format is that of the Hugging Face hub, which `huggingface_hub.ModelCard.load` reads. If the folder above is a
    run folder, the card has its data, settings, commit and metrics.

    Args:
        folder: the `final/` folder, with the model.
        class_names: names of the classes in the order of the labels.
        licence: name of the licence as the hub spells it, such as "apache-2.0".
    """
    folder = Path(folder)
    run = folder.parent if (folder.parent / CONFIG_FILE).is_file() else None
    config = read_json(folder / "config.json")
    environment = read_json_object(run / "environment.json") if run else {}
    here = environment.get("working_directory") or "."
    settings = without_machine(read_groups(run / CONFIG_FILE), here) if run else {}
    environment["command_line"] = without_machine(environment.get("command_line") or [], here)
    row = best_row(run) if run else {}
    of_run, of_folder = ((source.get("model") or {}).get("architecture") for source in (settings, config))
    architecture = of_run or of_folder or config.get("model_type", "detector")
    name = run.name if run else folder.name
    head = {
        "license": licence,
        "pipeline_tag": "object-detection",
        "library_name": "transformers" if "model_type" in config else "detection-toolkit",
        "tags": ["object-detection", architecture],
    }
    if row:
        head["model-index"] = [{"name": name, "results": _index(settings, row)}]
    parts = [
        f"# {in_markdown(name)}: {in_markdown(architecture)}",
        f"An object detector for {_counted_classes(class_names)}.",
        _picture(folder, run),
        "## Figures\n\n" + _figures(row, run),
        "## How to use it\n\n" + _usage(config, len(class_names)),
        "## Data\n\n" + _data(settings, environment),
        "## Training\n\n" + _training(settings, environment),
        "## Intended use and limits\n\n" + LIMITS_TEXT,
        f"## Licence\n\n`{licence}` {LICENCES_BELOW}",
    ]
    text = "\n\n".join(filter(None, parts))
    path = folder / "README.md"
    write_text_atomic(
        path,
        f"---\n{yaml.safe_dump(head, sort_keys=False, allow_unicode=True)}---\n\n{text}\n",
    )
    return path


def _counted_classes(names: Sequence[str]) -> str:
    listed = ", ".join(map(as_code, names[:MAX_SHOWN_CLASSES]))
    more = f" and {len(names) - MAX_SHOWN_CLASSES} more" if len(names) > MAX_SHOWN_CLASSES else ""
    return f"{len(names)} {'class' if len(names) == 1 else 'classes'}: {listed}{more}"


def best_row(run: Path) -> dict:
    """Return the metrics of a run's best checkpoint by name, such as "bbox_AP", and its `step`; empty without any."""
    state = read_json_object(run / "checkpoints" / "best" / "state.json")
    metric = (read_groups(run / CONFIG_FILE).get("eval") or {}).get("metric_for_best")
    if not isinstance(metric, str):
        return {}
    prefix = "val/ema/" if metric.startswith("ema/") else "val/"
    rows = [row for row in read_metrics(run / "metrics.jsonl") if f"{prefix}bbox_AP" in row]
    rows = [row for row in rows if row["step"] == state.get("step")] or rows
    if not rows:
        return {}
    return {"step": rows[-1]["step"]} | {k[len(prefix) :]: v for k, v in rows[-1].items() if k.startswith(prefix)}


def _index(settings: Mapping, row: Mapping) -> list[dict]:
    data = settings.get("data", {})
    metrics = []
    for metric in _shown(row):
        metrics.append({"type": metric.key, "name": metric.title, "value": row[metric.key]})
    dataset = {
        "type": str(data.get("name") or data.get("format") or "images"),
        "name": str(data.get("val")),
    }
    return [{"task": {"type": "object-detection"}, "dataset": dataset, "metrics": metrics}]


def _shown(row: Mapping) -> list[Metric]:
    """Return the metrics of a card that are defined."""
    of_row = metrics_of([row], "boxes", "masks")
    return [metric for metric in of_row if metric.title in SHOWN_METRICS and row.get(metric.key) is not None]


def _figures(row: Mapping, run: Path | None) -> str:
    metrics = {metric.title: row[metric.key] for metric in _shown(row)}
    if not metrics:
        return "None were measured."
    intervals = read_json_object(run / "report" / "report.json").get("intervals_95") or {}
    lines = ["| | validation data | 95 % interval |", "|---|---|---|"]
    for name, value in metrics.items():
        low, high = intervals.get(name) or (None, None)
        interval = f"{low:.4f} to {high:.4f}" if low is not None else "see `report/`"
        lines.append(f"| {name} | {value:.4f} | {interval} |")
    kinds = "metrics of boxes, and of masks (segm_)" if "segm_AP" in metrics else "box metrics"
    return "\n".join(lines) + f"\n\nCOCO's {kinds} at step {row['step']}; intervals are a bootstrap over images."


def _picture(folder: Path, run: Path | None) -> str:
    """Copy the newest picture of predictions of the run to the card's folder, and return its Markdown."""
    pictures = sorted((run / "report" / "pictures").glob("step_*.png")) if run else []
    if not pictures:
        return ""
    (folder / PICTURE).write_bytes(pictures[-1].read_bytes())
    return f"![Annotated boxes left, predictions right]({PICTURE})"


def _usage(config: Mapping, classes: int) -> str:
    if "model_type" in config:
        return TRANSFORMERS_USAGE
    model = config["model"]
    size = config.get("processor_size") or {}
    if model["architecture"] != "fasterrcnn_resnet50_fpn_v2":
        return TOOLKIT_USAGE + "\n\nWithout it: `scripts/export.py` makes an ONNX file of it."
    first = size.get("shortest_edge") or size.get("height") or 800
    smallest, largest = sorted((first, size.get("longest_edge") or size.get("width") or 1333))
    text = TORCHVISION_USAGE.replace("SMALLEST", str(smallest)).replace("LARGEST", str(largest))
    return text.replace("CLASSES", str(classes + 1)) + "\n\n" + TOOLKIT_USAGE


def _data(settings: Mapping, environment: Mapping) -> str:
    data = settings.get("data", {})
    counts = environment.get("data", {})
    if not data:
        return "Not known."
    splits = {"train": "training", "val": "validation"}
    lines = [f"- {name}: {as_code(data.get(key))}{_counted(counts.get(key))}" for key, name in splits.items()]
    return "\n".join([*lines, f"- format: {as_code(data.get('format'))}, name: {as_code(data.get('name'))}"])


def _counted(counts: Mapping | None) -> str:
    return f", {counts['images']} images, {counts['boxes']} boxes" if counts else ""


def _training(settings: Mapping, environment: Mapping) -> str:
    if not settings:
        return "Not known."
    command = shlex.join(map(str, environment.get("command_line", [])))
    git = environment.get("git") or {}
    commit = f"{git['commit']}{' with changes' if git.get('dirty') else ''}" if git else "not known"
    hardware = environment.get("hardware", {})
    machine = ", ".join(hardware.get("gpus") or [f"{hardware.get('cpu')}, {hardware.get('cpu_cores_usable')} cores"])
    versions = ", ".join(f"{k} {v}" for k, v in environment.get("packages", {}).items())
    recipe = {key: settings[key] for key in ("model", "optim", "schedule", "loss") if key in settings}
    text = yaml.safe_dump(json.loads(json.dumps(recipe)), sort_keys=False)
    started = f"seed {environment.get('seed')}, {environment.get('processes')} processes"
    about = f"Commit {commit}; {started}; {machine}; {versions}."
    return f"```bash\n{command}\n```\n\n{about}\n\n```yaml\n{text}```"


def check_licence(licence: str) -> None:
    """Raise BadInput if the name of a licence is not in a form that the Hugging Face hub accepts."""
    if not licence or not all(c.isalnum() or c in "-." for c in licence):
        raise BadInput(f"--licence {licence!r}: expected a name as the hub spells it, such as apache-2.0 or mit")
