"""The package: what it depends on, what a wheel holds, and the command `detect`."""

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
from dataclasses import asdict
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest
from places import ROOT

from toolkit.base.errors import BadInput
from toolkit.base.imports import import_extra, import_lightly
from toolkit.data.formats import open_dataset
from toolkit.run.command_line import parse_config
from toolkit.tools import detect

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]


def names(requirements: list[str]) -> set[str]:
    return {re.match(r"[\w-]+", each)[0].lower().replace("_", "-") for each in requirements}


def test_every_package_that_a_module_imports_at_its_top_is_in_the_core():
    core = names(PROJECT["project"]["dependencies"])
    for name in set(core):  # and what these need themselves, such as numpy
        core |= names([line for line in requires(name) or () if "extra ==" not in line])
    distributions = packages_distributions()
    for path in [*ROOT.glob("scripts/*.py"), *ROOT.glob("toolkit/**/*.py")]:
        for node in ast.parse(path.read_text()).body:
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module] if isinstance(node, ast.ImportFrom) else []
            for top in {module.split(".")[0] for module in modules} - {"toolkit", "benches"}:
                owners = {name.lower().replace("_", "-") for name in distributions.get(top, [])}
                assert top in sys.stdlib_module_names or owners & core, f"{path.name} imports {top}"


IMPORTS = """
import sys
import train_ssd, train_yolov3, train_faster_rcnn, train_sgg, train_detr
from toolkit.run.command_line import parse_config
parse_config(train_detr.Config, [], train_detr.DEFAULT_CONFIG)
print(*sys.modules)
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
# What was imported without torch's compiler has it when it is needed.
COMPILER = """
import sys
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
# A library that takes more of the compiler than is expected imports it.
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


def test_a_start_does_not_wait_for_imports_that_its_first_step_does_not_need():
    open_dataset("val", format="shapes")  # written once for all starts, by pyarrow, which imports pandas
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "scripts")])}
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, env=env, check=True)
    *modules, collector = done.stdout.splitlines()
    of_settings, of_training = (set(line.split()) for line in modules)
    assert "leaked" not in done.stderr
    assert int(collector.split()[0]) > 100_000 and collector.endswith("True")  # imports are not walked again and again
    assert "yaml" in of_settings and not {"torch", "accelerate"} & of_settings  # --help, a mistyped flag
    needless = {"transformers", "datasets", "pandas", "scipy", "matplotlib", "wandb", "tensorboard", "h5py"}
    needless |= {"torch._dynamo", "torch.distributed.tensor", "sympy", "triton"}  # the compiler, and sharded weights
    assert "timm" in of_training and not needless & of_training


def test_a_program_parses_its_flags_before_it_imports_what_takes_seconds():
    paths = sorted((ROOT / "scripts").glob("*.py"))
    names = [path.stem for path in paths if path.stem != "benchmark" and not path.stem.startswith("train_")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "scripts")])}
    command = [sys.executable, "-c", PARSED, *names]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=True)
    *ends, modules = done.stdout.splitlines()
    assert ends == [f"{name} ends with 2" for name in names] and len(names) > 10
    needless = {"torch", "accelerate", "transformers", "datasets", "pyarrow", "pandas", "matplotlib"}
    assert "yaml" in modules.split() and not needless & set(modules.split())


@pytest.mark.parametrize("program", [COMPILER, MORE_OF_THE_COMPILER])
def test_the_compiler_is_imported_where_it_is_needed(program, tmp_path):
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_lists_of_pyproject_have_every_extra_and_every_folder():
    (line,) = [line for line in (ROOT / "requirements.txt").read_text().splitlines() if not line.startswith("#")]
    assert set(re.fullmatch(r"-e \.\[(.+)\]", line)[1].split(",")) <= set(EXTRAS)
    modules = list(ROOT.glob("toolkit/**/*.py"))
    used = {extra for path in modules for extra in re.findall(r'import_extra\("\w+", "(\w+)"', path.read_text())}
    assert used and used <= set(EXTRAS)
    with pytest.raises(BadInput, match=r'^videos need nothing_of_it, .*: pip install "detection-toolkit\[video\]"$'):
        import_extra("nothing_of_it", "video", "videos")
    assert import_extra("json", "video", "videos") is json
    listed = PROJECT["tool"]["setuptools"]["packages"]
    folders = {".".join(path.parent.relative_to(ROOT).parts) for path in modules}
    assert folders == {name for name in listed if not name.startswith(("toolkit.scripts", "toolkit.configs"))}


def test_help_lists_every_script_with_what_it_does(capsys):
    assert detect.main([]) == 0
    text = capsys.readouterr().out
    for path in ROOT.glob("scripts/*.py"):
        assert path.stem == "benchmark" or detect.first_line(path) in text
    assert "detect train detr " in text and "detect check " in text and "detect predict " in text


@pytest.mark.parametrize(("words", "code", "expected"), [
    (["--version"], 0, f"detection-toolkit {PROJECT['project']['version']}"),
    (["where", "scripts/train_detr.py"], 0, f"{ROOT / 'scripts/train_detr.py'}"),
    (["trian"], 2, "did you mean train?"), (["train", "detrr"], 2, "did you mean detr?"),
    (["train"], 2, "needs one of detr, faster_rcnn"),
    (["where", "configs/detr/bcd.yaml"], 2, "mean configs/detr/bccd.yaml?"),
    (["copy", "train_dter", "mine.py"], 2, "did you mean train_detr?"),
    (["copy", "train_detr"], 2, "the path of the copy, such as mine.py"),
    (["copy", "train_detr", "mine.txt"], 2, "a name that ends in .py"),
    (["copy", "train_detr", "json.py"], 2, "would hide the module json"),
    (["copy", "train_detr", "nowhere/mine.py"], 2, "nowhere is not a folder"),
    (["copy", "train_detr", str(ROOT / "scripts" / "train_detr.py")], 2, "exists already"),
])  # fmt: skip
def test_words_are_answered(words, code, expected, capsys):
    assert detect.main(words) == code
    shown = capsys.readouterr()
    assert expected in shown.err if code else shown.out == f"{expected}\n"


@pytest.mark.parametrize("name", ["train", "copy", "where"])
def test_every_command_explains_itself(name, capsys):
    assert detect.main([name, "--help"]) == detect.main([name, "-h"]) == 0
    shown = capsys.readouterr()
    assert shown.out.count(f"usage: detect {name} ") == 2 and not shown.err


def test_each_copy_has_the_settings_of_its_script_and_a_run_of_its_own(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    for name in detect.detectors():
        assert detect.main(["copy", f"train_{name}", f"my_{name}.py"]) == 0
        copy, original = importlib.import_module(f"my_{name}"), importlib.import_module(f"scripts.train_{name}")
        config, expected = (parse_config(script.Config, [], script.DEFAULT_CONFIG) for script in (copy, original))
        assert config.run.name == f"my_{name}" and copy.DEFAULT_CONFIG == tmp_path / f"my_{name}.yaml"
        config.run.name = expected.run.name
        assert asdict(config) == asdict(expected)
        assert f"accelerate launch my_{name}.py" in copy.__doc__ and "scripts/train" not in copy.__doc__


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
def test_wheel_trains_and_predicts_outside_the_checkout(installed, tmp_path):
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    env |= {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}

    def run(*words: str) -> str:
        command = [str(installed / words[0]), *words[1:]]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    shown = run("python", "-c", "import importlib.metadata as m; print(m.requires('detection-toolkit'))")
    assert names(PROJECT["project"]["dependencies"]) <= names(ast.literal_eval(shown))
    assert str(installed.parent) in run("python", "-c", "import toolkit; print(toolkit.__file__)")
    small = "--data.max_train_images 8 --data.workers 0 --data.image_size 64 --data.batch_size_per_device 2"
    small += " --run.max_steps 2 --run.max_minutes null --model.num_queries 20"
    run("detect", "train", "detr", "--run.name", "mine", *small.split())
    assert json.loads((tmp_path / "runs/mine/status.json").read_text())["state"] == "done"
    picture = next((tmp_path / "runs/mine/report/pictures").glob("*.*"))
    run("detect", "predict", "runs/mine", str(picture), "--out", "found", "--score-threshold", "0.01")
    assert json.loads((tmp_path / "found/predictions.json").read_text())["images"][0]["detections"]
    script = run("detect", "where", "scripts/train_detr.py").strip()
    torchrun = ["-m", "torch.distributed.run", "--nproc_per_node", "2"]
    run("python", *torchrun, script, "--run.name", "two", *small.split())
    assert json.loads((tmp_path / "runs/two/environment.json").read_text())["processes"] == 2
    assert run("python", "-m", "toolkit.scripts.train_detr", "--print_config")


def test_a_module_can_be_imported_without_wandb(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "wandb", None)
    del sys.modules["wandb"]
    (tmp_path / "wandb.py").write_text("")
    for name in ("first_of_ours", "second_of_ours"):
        (tmp_path / f"{name}.py").write_text("try:\n    import wandb\nexcept ImportError:\n    wandb = None\n")
    import_lightly("first_of_ours")
    assert sys.modules["first_of_ours"].wandb is None and "wandb" not in sys.modules
    importlib.import_module("wandb")
    import_lightly("second_of_ours")
    assert sys.modules["second_of_ours"].wandb is sys.modules["wandb"]
