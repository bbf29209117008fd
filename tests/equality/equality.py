"""Record what the programs of a checkout do, and compare another checkout with it: the proof of a reshaping.

    python tests/equality/equality.py record before.json                       # of this checkout, about four minutes
    python tests/equality/equality.py record before.json --project ../other    # of another one
    python tests/equality/equality.py compare before.json                      # exit code 1 if anything differs
    python tests/equality/equality.py compare before.json --only settings data --folders DIR [DIR ...]

Only what a user gives and gets is looked at, so that any code in between may change: commands, what they print, and
what they write.

    runs      seven trainings of 20 steps: hashes of every batch, losses, weights and optimizer after the last step,
              predictions, report, config.yaml
    settings  `--print_config` of every settings file; `--help all` of every script; sentences on faulty flags
    data      the bundled shapes in every format, and every folder given: what `check_data.py` prints, and what
              `convert.py` makes of it

Two records of one checkout on one machine are equal. Other machines round differently.
"""

import argparse
import contextlib
import difflib
import hashlib
import io
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SECTIONS = ("runs", "settings", "data")
STEPS = 20
PASSING = ("time", "mem", "machine")  # keys of a row that a clock or the machine decides

# Script, small settings in tests/assets/configs, and flags of each training.
MASKS = ["--model.masks", "true", "--model.mask_convs", "1", "--model.mask_channels", "8"]
RUNS = {
    "rt_detr_v2": ("train_detr", "train_detr", []),
    "detr": ("train_detr", "detr_published", []),
    "masks": ("train_faster_rcnn", "train_faster_rcnn", MASKS),
    "ssd": ("train_ssd", "train_ssd", []),
    "yolov3_mosaic": ("train_yolov3", "train_yolov3", []),
    "scene_graphs": ("train_sgg", "train_sgg", []),
    "tiles": ("train_detr", "train_detr", ["--data.tile", "48"]),
}
# Commands that are refused, each for another reason.
FAULTS = [
    ["--run.nam", "x"],
    ["--run.nam", "x", "--optim.lr", "fast", "--data.tile", "0"],
    ["--optim.lr", "nan"],
    ["--run.max_steps", "three"],
    ["--run.seed", "null"],
    ["--model.architecture", "detrr"],
    ["--model.backbone", "resnet-50"],
    ["--loss.weights.loss_unknown", "1"],
    ["--data.path", "no/such/folder"],
    ["--config", "no_such_file.yaml"],
    ["--run.epochs"],
    ["word"],
]


# ---- inside a process of the checkout --------------------------------------------------------------------------------


def call(script: str, arguments: list[str]) -> dict[str, Any]:
    """Run a program of the checkout in this process, and return its exit code and what it printed."""
    out = io.StringIO()
    code: Any = 0
    before = sys.argv
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))  # as Python does for a script
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            code = end.code
    sys.path.pop(0)
    sys.argv = before
    return {"code": code or 0, "text": out.getvalue()}


def call_all(commands: list[list[str]]) -> list[dict[str, Any]]:
    """Return what each command prints; the first word of each is the program."""
    return [call(program, arguments) for program, *arguments in commands]


def train(script: str, arguments: list[str]) -> dict[str, Any]:
    """Train, and return a hash of each batch that the model got, beside what `call` returns."""
    from torch.nn.modules.module import register_module_forward_pre_hook

    from toolkit import Detector

    batches = []

    def note(module: Any, inputs: tuple) -> None:
        if isinstance(module, Detector) and module.training:
            batches.append(digest(inputs))

    with contextlib.closing(_Handle(register_module_forward_pre_hook(note))):
        return {**call(script, arguments), "batches": batches}


class _Handle:
    """A hook's handle with the method that `contextlib.closing` calls."""

    def __init__(self, handle: Any):
        self.close = handle.remove


def digest(value: Any) -> str:
    """Return a hash of tensors in lists, tuples and dicts: of their types, shapes and bytes."""
    import torch

    found = hashlib.sha256()
    if isinstance(value, torch.Tensor):
        content = value.detach().cpu().contiguous()
        found.update(f"{content.dtype} {tuple(content.shape)}".encode())
        found.update(content.reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            found.update(f"{key}: {digest(value[key])}".encode())
    elif isinstance(value, list | tuple):
        for item in value:
            found.update(digest(item).encode())
    elif hasattr(value, "__dict__"):  # masks, for example
        found.update(digest(vars(value)).encode())
    else:
        found.update(repr(value).encode())
    return found.hexdigest()[:16]


def tensors(folder: Path) -> dict[str, str]:
    """Return a hash of every tensor in a checkpoint or a folder of final weights, by file and name."""
    import torch
    from safetensors.torch import load_file

    hashes = {}
    for file in sorted(folder.glob("*.safetensors")):
        hashes |= {f"{file.name}/{name}": digest(tensor) for name, tensor in load_file(file).items()}
    for file in sorted(folder.glob("*.pt")):
        content = torch.load(file, weights_only=True)
        for name, part in content.items():
            hashes[f"{file.name}/{name}"] = digest(part)
    return hashes


def make_data(folder: Path) -> None:
    """Write small pictures of shapes in COCO's format."""
    from toolkit.tools.shapes import make_shapes

    make_shapes(folder, train_images=18, val_images=10, image_size=64)


INSIDE = {"call_all": call_all, "train": train, "make_data": lambda folder: make_data(Path(folder)),
          "tensors": lambda folder: tensors(Path(folder))}  # fmt: skip


# ---- from outside ----------------------------------------------------------------------------------------------------


class Checkout:
    """The programs of a checkout, and a folder to work in."""

    def __init__(self, project: Path, folder: Path):
        self.project = project.resolve()
        self.folder = folder
        self.shapes = folder / "shapes"
        self.inside("make_data", str(self.shapes))

    def inside(self, function: str, *arguments: Any) -> Any:
        """Call a function of this file in a new process that imports the checkout's toolkit."""
        environment = os.environ | {
            "PYTHONPATH": str(self.project),
            "OMP_NUM_THREADS": "1",
            "ACCELERATE_USE_CPU": "true",
            "WANDB_MODE": "offline",
            "HF_HUB_OFFLINE": "1",
            "COLUMNS": "120",
            "DETECTION_TOOLKIT_CACHE": str(self.folder / "cache"),
        }
        result = self.folder / "result.json"
        result.write_text(json.dumps(arguments))
        subprocess.run([sys.executable, __file__, "inside", function, str(result)],
                       env=environment, cwd=self.project, check=True)  # fmt: skip
        return json.loads(result.read_text())

    def plain(self, text: str) -> str:
        """Return a text without what differs from one place and time to the next: paths, times, memory."""
        text = text.replace(str(self.folder), "<work>").replace(str(self.project), "<project>")
        text = re.sub(r"\b\d+(\.\d+)?(e-\d+)? (s/step|GiB|MiB|s / step|ms|minutes)\b", "<number> \\3", text)
        text = re.sub(r"\(data \d+%\)", "(data <number>%)", text)
        text = re.sub(r'"commit": "[0-9a-f]{40}"', '"commit": "<commit>"', text)
        text = re.sub(r"\d:\d\d:\d\d", "<time>", text)
        return re.sub(r"in \d+(\.\d+)? s\b", "in <time> s", text)

    def calls(self, commands: list[list[str]]) -> dict[str, Any]:
        """Return exit code and text of each command by its words."""
        results = self.inside("call_all", commands)
        named = {}
        for command, result in zip(commands, results, strict=True):
            words = self.plain(" ".join(command))
            named[words] = {"code": result["code"], "text": self.plain(result["text"])}
        return named


def record_runs(checkout: Checkout) -> dict[str, Any]:
    annotations = checkout.shapes / "annotations"
    runs = {}
    for name, (script, settings, flags) in RUNS.items():
        print(f"training {name}", flush=True)
        arguments = ["--config", f"tests/assets/configs/{settings}.yaml", *flags]
        arguments += ["--data.format", "coco", "--data.train", str(annotations / "train.json")]
        arguments += ["--data.val", str(annotations / "val.json"), "--data.image_size", "64"]
        arguments += ["--data.batch_size_per_device", "4", "--run.epochs", "9", "--run.max_steps", str(STEPS)]
        arguments += ["--run.max_minutes", "null", "--run.eval_every", "10", "--run.log_every", "1"]
        arguments += ["--optim.ema_decay", "0.9", "--data.workers", "1" if name == "yolov3_mosaic" else "0"]
        arguments += ["--run.output_dir", str(checkout.folder / "runs"), "--run.name", name]
        trained = checkout.inside("train", f"scripts/{script}.py", arguments)
        runs[name] = {"code": trained["code"], "batches": trained["batches"], "text": checkout.plain(trained["text"])}
        if trained["code"] != 0:
            print(trained["text"])
            continue
        runs[name] |= read_run(checkout, checkout.folder / "runs" / name)
    return runs


def read_run(checkout: Checkout, run: Path) -> dict[str, Any]:
    """Return what a run folder holds, without times and paths."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    state = json.loads((run / "checkpoints/latest/state.json").read_text())
    state["parts"].pop("log", None)  # times
    report = json.loads((run / "report/report.json").read_text())
    return {
        "rows": [{key: row[key] for key in row if not key.startswith(PASSING)} for row in rows],
        "config": checkout.plain((run / "config.yaml").read_text()),
        "checkpoint": checkout.inside("tensors", str(run / "checkpoints/latest")),
        "state": json.loads(checkout.plain(json.dumps(state))),
        "final": checkout.inside("tensors", str(run / "final")),
        "predictions": json.loads((run / "report/predictions.json").read_text()),
        "report": json.loads(checkout.plain(json.dumps(report))),
        "page": checkout.plain((run / "report/README.md").read_text()),
        "files": sorted(str(file.relative_to(run)) for file in run.rglob("*") if file.is_file()),
    }


def record_settings(checkout: Checkout) -> dict[str, Any]:
    print("settings", flush=True)
    scripts = sorted(checkout.project.glob("scripts/train_*.py"))
    script_of = {script.stem.removeprefix("train_"): f"scripts/{script.name}" for script in scripts}
    commands = []
    for file in sorted(checkout.project.glob("configs/*/*.yaml")):
        named = re.search(r"scripts/train_\w+\.py", file.read_text())
        if named and file.parent.name in script_of:
            command = [named[0], "--config", str(file.relative_to(checkout.project))]
            commands += [[*command, "--print_config"], [*command, "--data.path", "DIR", "--print_config"]]
    for name in script_of.values():
        small = f"tests/assets/configs/{Path(name).stem}.yaml"
        commands += [[name, "--print_config"], [name, "--help"], [name, "--help", "all"]]
        commands += [[name, "--config", small, "--print_config"]]
        commands += [[name, *fault] for fault in FAULTS]
    others = [file for file in sorted(checkout.project.glob("scripts/*.py")) if file not in scripts]
    commands += [[f"scripts/{file.name}", "--help"] for file in others]
    return checkout.calls(commands)


def record_data(checkout: Checkout, folders: list[Path]) -> dict[str, Any]:
    print("data", flush=True)
    work = checkout.folder / "formats"
    formats = {name: work / name for name in ("coco", "voc", "yolo", "csv", "parquet")}
    source = str(checkout.shapes)
    made = [["scripts/convert.py", source, str(place), "--to", name] for name, place in formats.items()]
    made += [["scripts/convert.py", source, str(work / "segments"), "--to", "yolo", "--masks"]]
    recorded = checkout.calls(made)
    places = [checkout.shapes, *formats.values(), work / "segments"]
    dirty = checkout.project / "tests/assets/dirty"
    places += [dirty, dirty / "annotations/instances.json"]
    places += folders
    commands = []
    copies = {}
    for number, place in enumerate(places):
        images = ["--image-dir", str(place.parents[1] / "images")] if place.suffix == ".json" else []
        commands += [["scripts/check_data.py", str(place), *images]]
        commands += [["scripts/check_data.py", str(place), *images, "--masks", "--on-error", "drop"]]
        copies[str(place)] = work / f"copy_{number}"
        commands += [["scripts/convert.py", str(place), str(copies[str(place)]), *images, "--to", "coco", "--masks",
                      "--on-error", "drop"]]  # fmt: skip
    recorded |= checkout.calls(commands)
    for place, copy in copies.items():
        for file in sorted(copy.rglob("*.json")):
            recorded[checkout.plain(f"{place} -> {file.relative_to(copy)}")] = json.loads(file.read_text())
    return recorded


def record(project: Path, sections: list[str], folders: list[Path]) -> dict[str, Any]:
    """Return what the programs of a checkout do, by section."""
    folder = Path(tempfile.mkdtemp(prefix="equality"))
    try:
        checkout = Checkout(project, folder)
        recorded = {}
        if "runs" in sections:
            recorded["runs"] = record_runs(checkout)
        if "settings" in sections:
            recorded["settings"] = record_settings(checkout)
        if "data" in sections:
            recorded["data"] = record_data(checkout, folders)
        return recorded
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# ---- comparison ------------------------------------------------------------------------------------------------------


def differences(before: Any, after: Any, place: str = "") -> list[str]:
    """Return a text for each place where two records differ."""
    if isinstance(before, dict) and isinstance(after, dict):
        found = []
        for key in [*before, *(key for key in after if key not in before)]:
            if key not in after:
                found.append(f"{place}/{key}: only before")
            elif key not in before:
                found.append(f"{place}/{key}: only after")
            else:
                found += differences(before[key], after[key], f"{place}/{key}")
        return found
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        pairs = enumerate(zip(before, after, strict=True))
        return [text for i, (old, new) in pairs for text in differences(old, new, f"{place}[{i}]")]
    if json.dumps(before) == json.dumps(after):
        return []
    if isinstance(before, str) and isinstance(after, str) and "\n" in before + after:
        lines = difflib.unified_diff(before.splitlines(), after.splitlines(), "before", "after", lineterm="", n=0)
        return ["\n    ".join([f"{place}:", *list(lines)[2:]])]
    return [f"{place}: {str(before)[:200]} | {str(after)[:200]}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["record", "compare"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--project", type=Path, default=ROOT, help="the checkout; this one if not given")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--folders", nargs="+", type=Path, default=[], help="more data sets, with faults or without")
    asked = parser.parse_args()
    recorded = record(asked.project, asked.only, [folder.resolve() for folder in asked.folders])
    if asked.what == "record":
        asked.file.write_text(json.dumps(recorded, indent=1))
        return 0
    before = json.loads(asked.file.read_text())
    found = differences({section: before.get(section) for section in asked.only}, recorded)
    print("\n".join(found))
    print(f"{len(found)} differences")
    return 1 if found else 0


if __name__ == "__main__":
    if sys.argv[1] == "inside":
        _, _, name, file = sys.argv
        answer = INSIDE[name](*json.loads(Path(file).read_text()))
        Path(file).write_text(json.dumps(answer))
        sys.exit(0)
    sys.exit(main())
