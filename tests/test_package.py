"""The package: what it depends on, what a start imports, and a wheel in an environment of its own."""

import ast
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest
from places import ROOT

from toolkit.base.errors import BadInput
from toolkit.base.imports import import_extra, import_lightly
from toolkit.data.formats import open_dataset

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
MODULES = sorted(ROOT.glob("toolkit/**/*.py"))


def names(requirements: list[str]) -> set[str]:
    return {re.match(r"[\w-]+", each)[0].lower().replace("_", "-") for each in requirements}


def imported_at_the_top(path: Path) -> set[str]:
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            found.add(node.module.split(".")[0])
    return found - {"toolkit", "benches"} - sys.stdlib_module_names


def test_every_package_that_a_module_imports_at_its_top_is_in_the_core():
    core = names(PROJECT["project"]["dependencies"])
    for name in set(core):  # and what these need themselves, such as numpy
        core |= names([line for line in requires(name) or () if "extra ==" not in line])
    distributions = packages_distributions()
    for path in [*ROOT.glob("scripts/*.py"), *MODULES]:
        for module in imported_at_the_top(path):
            assert names(distributions.get(module, [])) & core, f"{path.name} imports {module}"


def test_the_lists_of_pyproject_have_every_extra_and_every_folder():
    (line,) = [line for line in (ROOT / "requirements.txt").read_text().splitlines() if not line.startswith("#")]
    assert set(re.fullmatch(r"-e \.\[(.+)\]", line)[1].split(",")) <= set(EXTRAS)
    used = {extra for path in MODULES for extra in re.findall(r'import_extra\("\w+", "(\w+)"', path.read_text())}
    assert used
    assert used <= set(EXTRAS)
    listed = PROJECT["tool"]["setuptools"]["packages"]
    folders = {".".join(path.parent.relative_to(ROOT).parts) for path in MODULES}
    assert folders == {name for name in listed if not name.startswith(("toolkit.scripts", "toolkit.configs"))}


def test_a_missing_extra_is_one_sentence_with_its_command():
    with pytest.raises(BadInput, match=r'^videos need nothing_of_it, .* installed: pip install "\.\[video\]"'):
        import_extra("nothing_of_it", "video", "videos")
    assert import_extra("json", "video", "videos") is json


# ---- what a start waits for ------------------------------------------------------------------------------------------

SETTINGS = """
import sys
import train_ssd, train_yolov3, train_faster_rcnn, train_sgg, train_detr
from toolkit.run.command_line import parse_config
parse_config(train_detr.Config, [], train_detr.DEFAULT_CONFIG)
print(*sys.modules)
"""
FIRST_STEP = """
from toolkit import session
from toolkit.evaluation.coco import make_evaluator
from toolkit.models import build_detector, detector_class
from toolkit.detectors.scene_graphs.start import start_scene_graph
for architecture in ("ssd", "yolov3", "faster_rcnn", "scene_graph"):
    detector_class(architecture)
build_detector("faster_rcnn", class_names=["a"], backbone="resnet10t")
from toolkit.data.formats import open_dataset
from toolkit.evaluation.coco import check_ground_truth
val_table = open_dataset("val", format="shapes")
val_table.row(0), check_ground_truth(val_table)
import torch
from toolkit.run.processes import prepare, start_accelerator
from toolkit.step.optim import build_optimizer
model = torch.nn.Linear(1, 1)
model.buffers_steer_training = model.leaves_unused = False
for name in ("adamw", "adam", "sgd"):
    groups = [{"params": list(model.parameters()), "lr": 0.1, "name": "all"}]
    _, optimizer = prepare(start_accelerator("no"), model, build_optimizer(name, groups), None, False)
    model(torch.ones(1)).backward()
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.zero_grad()
print(*sys.modules)
import gc
print(gc.get_freeze_count(), gc.isenabled())
"""
PARSED = """
import importlib, sys
for name in sys.argv[1:]:
    try:
        importlib.import_module(name).main(["--mistyped"])
    except SystemExit as end:
        print(name, "ends with", end.code)
print(*sys.modules)
"""
# What was imported without torch's compiler has it when it is needed. A library that takes more of it imports it.
COMPILER = """
import sys
from pathlib import Path
from toolkit.data import decoding
from torchvision import tv_tensors
from torchvision.ops import roi_align
import torch
assert "torch._dynamo" not in sys.modules and "torch._dynamo.utils" not in sys.modules
box = tv_tensors.Mask(torch.zeros(1, 2, 2))
assert type(tv_tensors.wrap(torch.ones(1, 2, 2), like=box)) is tv_tensors.Mask
assert torch.compiler.disable.__module__ == "torch.compiler"
function = sys.modules[roi_align.__module__].is_compile_supported
assert "torch._dynamo" not in sys.modules and function("cpu") in (True, False) and "torch._dynamo" in sys.modules
assert sys.modules["torch._dynamo.utils"].__file__

def masked(x):
    return tv_tensors.wrap(2 * x, like=box) + 1

compiled = torch.compile(masked, backend="eager")
assert torch.equal(compiled(torch.ones(1, 2, 2)), torch.full((1, 2, 2), 3.0))
"""
MORE_OF_THE_COMPILER = """
import sys, torch
from pathlib import Path
Path("more.py").write_text("from torch._dynamo.utils import counters")
sys.path.append("")
from toolkit.base.imports import import_lightly
import_lightly("more")
assert sys.modules["more"].counters is torch._dynamo.utils.counters
assert sys.modules["torch._dynamo.utils"].__file__
"""
HEAVY = {"transformers", "datasets", "pandas", "scipy", "matplotlib", "wandb", "tensorboard", "h5py"}
HEAVY |= {"torch._dynamo", "torch.distributed.tensor", "sympy", "triton"}  # the compiler, and sharded weights


def python(program: str, *words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "scripts")])}
    command = [sys.executable, "-c", program, *words]
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd=cwd, check=True)


def test_a_start_does_not_wait_for_imports_that_its_first_step_does_not_need():
    open_dataset("val", format="shapes")  # written once for all starts, by pyarrow, which imports pandas
    done = python(SETTINGS + FIRST_STEP)
    *modules, collector = done.stdout.splitlines()
    of_settings, of_training = (set(line.split()) for line in modules)
    assert "leaked" not in done.stderr
    frozen, is_enabled = collector.split()
    assert int(frozen) > 100_000, "imports are not walked again and again"
    assert is_enabled == "True"
    assert "yaml" in of_settings
    assert not {"torch", "accelerate"} & of_settings, "--help, a mistyped flag"
    assert "timm" in of_training
    assert not HEAVY & of_training


def test_a_program_parses_its_flags_before_it_imports_what_takes_seconds():
    stems = [path.stem for path in sorted((ROOT / "scripts").glob("*.py"))]
    programs = [stem for stem in stems if stem != "benchmark" and not stem.startswith("train_")]
    *ends, modules = python(PARSED, *programs).stdout.splitlines()
    assert ends == [f"{name} ends with 2" for name in programs]
    assert len(programs) > 10
    assert "yaml" in modules.split()
    assert not {"torch", "accelerate", "transformers", "datasets", "pyarrow", "pandas"} & set(modules.split())


@pytest.mark.parametrize("program", [COMPILER, MORE_OF_THE_COMPILER])
def test_the_compiler_is_imported_where_it_is_needed(program, tmp_path):
    python(program, cwd=tmp_path)


def test_a_module_can_be_imported_without_wandb(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "wandb", None)
    del sys.modules["wandb"]
    (tmp_path / "wandb.py").write_text("")
    for name in ("first_of_ours", "second_of_ours"):
        (tmp_path / f"{name}.py").write_text("try:\n    import wandb\nexcept ImportError:\n    wandb = None\n")
    import_lightly("first_of_ours")
    assert sys.modules["first_of_ours"].wandb is None
    assert "wandb" not in sys.modules
    importlib.import_module("wandb")
    import_lightly("second_of_ours")
    assert sys.modules["second_of_ours"].wandb is sys.modules["wandb"]


# ---- the wheel -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The folder of commands of a fresh environment with the wheel in it; its dependencies are those of this one."""
    folder = tmp_path_factory.mktemp("package")
    source = folder / "source"
    for part in ("toolkit", "scripts", "configs"):
        shutil.copytree(ROOT / part, source / part, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / file, source / file)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    build = ["wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(folder), str(source)]
    subprocess.run([*pip, *build], check=True)
    venv.create(folder / "venv")
    python = folder / "venv" / "bin" / "python"
    (wheel,) = folder.glob("*.whl")
    install = ["install", "--no-deps", "--no-index", "--ignore-installed", str(wheel)]  # that of PYTHONPATH, say
    subprocess.run([*pip, "--python", str(python), *install], check=True)
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    (site / "others.pth").write_text(f"{sysconfig.get_path('purelib')}\n")  # no .pth file there is read
    return python.parent


@pytest.mark.slow
def test_a_wheel_trains_and_predicts_outside_the_checkout(installed, tmp_path):
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    env |= {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}

    def run(program: str, *words: str) -> str:
        command = [str(installed / program), *words]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    shown = run("python", "-c", "import importlib.metadata as m; print(m.requires('detection-toolkit'))")
    assert names(PROJECT["project"]["dependencies"]) <= names(ast.literal_eval(shown))
    assert str(installed.parent) in run("python", "-c", "import toolkit; print(toolkit.__file__)")
    small = "--data.max_train_images 8 --data.workers 0 --data.image_size 64 --data.batch_size_per_device 2"
    small += " --run.max_steps 2 --run.max_minutes null --model.num_queries 20"
    run("detect", "train", "detr", "--run.name", "mine", *small.split())
    runs = tmp_path / "runs"
    assert json.loads((runs / "mine" / "status.json").read_text())["state"] == "done"
    picture = next((runs / "mine" / "report" / "pictures").glob("*.*"))
    run("detect", "predict", "runs/mine", str(picture), "--out", "found", "--score-threshold", "0.01")
    assert json.loads((tmp_path / "found" / "predictions.json").read_text())["images"][0]["detections"]
    script = run("detect", "where", "scripts/train_detr.py").strip()
    torchrun = "-m torch.distributed.run --nproc_per_node 2"
    run("python", *torchrun.split(), script, "--run.name", "two", *small.split())
    assert json.loads((runs / "two" / "environment.json").read_text())["processes"] == 2
    assert run("python", "-m", "toolkit.scripts.train_detr", "--print_config")
