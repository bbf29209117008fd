"""The promises of the tree: layers that import one way, scripts that are one loop, short functions, nothing private."""

import ast
import difflib
import graphlib
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest
from places import ROOT

from toolkit import index

TRAINING = sorted((ROOT / "scripts").glob("train_*.py"))
MODULES = sorted((ROOT / "toolkit").rglob("*.py"))


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT / "toolkit").with_suffix("").parts).removesuffix("__init__").rstrip(".")


NAMES = {name_of(path): path for path in MODULES}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


# ---- the training scripts --------------------------------------------------------------------------------------------

IN_ORDER = ["t.windows", "t.model", "t.detector.criterion", "t.loss_weights", "window.reduce", "t.guard.accepts"]
IN_ORDER += ["window.clip", "t.optimizer.step", "t.ema.update", "t.meters.update"]


def function_of(script: Path, name: str) -> ast.FunctionDef:
    (found,) = (node for node in tree_of(script).body if isinstance(node, ast.FunctionDef) and node.name == name)
    return found


@pytest.mark.parametrize("path", TRAINING, ids=lambda path: path.stem)
def test_a_training_script_is_its_loop(path):
    """And the loop of the first, which that of the others is, has the order of docs/design.md."""
    source = path.read_text()
    assert source.count("\n") <= 130
    assert max(map(len, source.splitlines())) <= 110
    assert "fmt: skip" not in source
    for name, lines in {"train_one_epoch": 40, "train": 25, "main": 25}.items():
        function = function_of(path, name)
        assert function.end_lineno - function.lineno < lines
    assert "accelerate launch scripts/" in ast.get_docstring(tree_of(path)), "opens with the commands that run it"
    calls = [node for node in ast.walk(function_of(path, "train_one_epoch")) if isinstance(node, ast.Call)]
    names = [ast.unparse(call.func) for call in sorted(calls, key=lambda call: call.lineno)]
    assert [name for name in names if name in IN_ORDER] == IN_ORDER
    assert not {"print", "exec", "eval"} & set(names)


# Script -> function -> lines that differ from train_detr.py.
ALLOWED = {
    "train_ssd": {  # CVNets: losses weigh each other
        "train_one_epoch": ["+ t.detector.multibox.balance_losses(window.totals)"],
    },
    "train_sgg": {  # a head on a detector starts in its own way, and recall is measured, not AP
        "train": [
            "- from toolkit.evaluation.coco import CocoEvaluator",
            "+ from toolkit.evaluation.coco import GRAPH_EVAL_SETTINGS, make_evaluator",
            "+ from toolkit.detectors.scene_graphs.start import lacking_relations, start_scene_graph",
            "- detector = s.make_detector(table)",
            "- t = s.training(detector, table, val_table, CocoEvaluator(val_table, s.config.eval.backend))",
            "+ detector = s.make_detector(table, start_scene_graph)",
            "+ note = None if s.checkpoint else without_detector(s.config.model, s.config.data.path)",
            "+ if note:",
            "+ s.say(note)",
            "+ for note in lacking_relations(table, val_table):",
            "+ s.say(note)",
            "+ of_graphs = {key: getattr(s.config.eval, key) for key in GRAPH_EVAL_SETTINGS}",
            "+ evaluator = make_evaluator(detector, val_table, s.config.eval.backend, **of_graphs)",
            "+ t = s.training(detector, table, val_table, evaluator)",
        ]
    },
}


def statements(script: str, function: str) -> list[str]:
    text = ast.unparse(function_of(ROOT / "scripts" / f"{script}.py", function))
    return [line.strip() for line in text.splitlines()]


@pytest.mark.parametrize("function", ["train_one_epoch", "train", "main"])
@pytest.mark.parametrize("script", [path.stem for path in TRAINING if path.stem != "train_detr"])
def test_a_script_differs_from_the_first_only_where_it_says_why(script, function):
    diff = difflib.ndiff(statements("train_detr", function), statements(script, function))
    different = [line for line in diff if line[0] in "+-"]
    assert sorted(different) == sorted(ALLOWED.get(script, {}).get(function, []))


# ---- who imports whom ------------------------------------------------------------------------------------------------

# The core, room by room: what each may import beside `base` and `index`, as rooms or as single modules. docs/design.md
# draws it.
OF_RUN = {"checkpoint_content", "layers", "open_run", "settings_check", "settings_file"}
CORE = {
    "base": set(),
    "step": set(),
    "data": set(),
    "evaluation": {"data.table", "data.tile_table", "models.joined_tiles", "step.execution", "step.freezing"},
    "models": {"step", "data.table", *(f"run.{name}" for name in OF_RUN)},
    "run": {"step", "data", "evaluation", "models"},
}
# The modules of `run` that the loop is made of, each of which may import those before it. The others keep the files and
# processes of a run, and import none of these.
LOOP = "command_line log saving training_window recovery validation loop training session_build session_begin".split()
LOOP += ["session_end", "session"]
# Detectors that are built on others, and tools whose subject is one family of detectors.
FAMILIES = (
    ("detectors.scene_graphs", "detectors.detr"),
    ("detectors.scene_graphs", "detectors.faster_rcnn"),
    ("tools.anchors", "detectors.yolov3"),
    ("tools.distillation", "detectors.detr"),
    ("tools.export", "detectors.faster_rcnn"),
    ("tools.predict", "detectors.scene_graphs"),
)


def imported(path: Path, inside: bool = True) -> set[str]:
    """Modules of the toolkit that a file imports, without `toolkit.`; inside: also in functions."""
    tree = tree_of(path)
    modules = set()
    for node in ast.walk(tree) if inside else tree.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "toolkit":
            room = node.module.partition(".")[2]
            files = {f"{room}.{alias.name}".strip(".") for alias in node.names}
            modules |= {file for file in files if file in NAMES or not room}
            modules |= {room} - {""}
    return modules


def is_below(module: str, room: str) -> bool:
    return f"{module}.".startswith(f"{room}.")


def layer_of(module: str) -> str:
    first = module.split(".")[0]
    return first if first in ("detectors", "tools") else "core"


def may_import(importer: str, module: str) -> bool:
    """The rule of the house: the core imports neither detectors nor tools, a detector the core, a tool the core."""
    layer = layer_of(importer)
    target = layer_of(module)
    if layer == "core":
        return target == "core" and core_may_import(importer, module)
    if target == "core":
        return True
    if target == "tools":
        return layer == "tools"
    own = ".".join(importer.split(".")[:2])
    is_own = layer == "detectors" and is_below(module, own)
    return is_own or any(is_below(importer, name) and is_below(module, family) for name, family in FAMILIES)


def core_may_import(importer: str, module: str) -> bool:
    room, _, name = importer.partition(".")
    target, _, other = module.partition(".")
    if target == "base" or module == "index" and room != "base":
        return True
    if room != "run" or target != "run":
        return target == room or any(is_below(module, allowed) for allowed in CORE.get(room, ()))
    if other not in LOOP:
        return True
    return name in LOOP and LOOP.index(other) < LOOP.index(name)


def test_imports_have_no_circle():
    graph = {}
    for name, path in NAMES.items():
        graph[name] = {module for module in imported(path, inside=False) if not is_below(name, module)}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names it
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(graph | {"base.errors": {"run.session"}}).prepare()


def test_imports_point_one_way():
    wrong = [(name, other) for name, path in NAMES.items() for other in imported(path) if not may_import(name, other)]
    assert not wrong, "must not import these"


@pytest.mark.parametrize(
    ("importer", "module"),
    [
        ("data.table", "evaluation.coco"),
        ("base.batch", "data.table"),
        ("base.text", "index"),
        ("run.saving", "run.training"),
        ("run.checkpoint", "run.session"),
        ("run.session", "tools.export"),
        ("models.start", "detectors.detr.options"),
        ("step.guard", "models.detector"),
        ("detectors.ssd.model", "detectors.yolov3.model"),
        ("detectors.detr.detr", "tools.report"),
        ("tools.report.page", "detectors.detr.options"),
    ],
)
def test_a_wrong_import_would_be_noticed(importer, module):
    assert not may_import(importer, module)


@pytest.mark.parametrize(("importer", "family"), FAMILIES)
def test_each_exception_of_the_rule_is_needed(importer, family):
    paths = [path for name, path in NAMES.items() if is_below(name, importer)]
    assert any(is_below(module, family) for path in paths for module in imported(path))


def test_the_core_names_what_lies_outside_in_its_index_alone():
    """Neither by a name in a text, as a table of detectors has it."""
    names = re.compile(r"^(?!.*`).*toolkit\.(detectors|tools)\.", re.MULTILINE)  # not in docstrings and comments
    naming = {name for name, path in NAMES.items() if layer_of(name) == "core" and names.search(path.read_text())}
    assert naming == {"index"}


def test_everything_in_the_index_is_there():
    tables = (index.READERS, index.RECIPES, index.WEIGHT_FILES, index.TRACKERS, index.TOOLS, index.REPORT_STATISTICS)
    references = [reference for table in tables for reference in table.values()]
    references += [reference for pair in index.DETECTORS.values() for reference in pair]
    for reference in (*references, *index.PUBLISHERS, index.OTHER_TRACKERS):
        assert index.load(reference) is not None
    for _, options in index.DETECTORS.values():  # the command line tells families apart by the module that is named
        assert index.load(options).__module__ == options.partition(":")[0]


# ---- what stands in a module -----------------------------------------------------------------------------------------

GROUPS = {"run", "data", "model", "optim", "schedule", "loss", "eval"}


def reads_settings(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr in GROUPS and ast.unparse(node.value).endswith("config")


def test_only_the_session_reads_settings():
    readers = {name for name, path in NAMES.items() if any(map(reads_settings, ast.walk(tree_of(path))))}
    of_session = {name for name in NAMES if name.startswith("run.session")}
    assert readers == of_session | {"tools.notebook"}, "the last says where a run lies, for the cells that follow"


# What the toolkit must not hold, as patterns to find it by: none of them is called here.
FORBIDDEN = (r"\bpdb\b", r"except:\s*$", r"sys\.exit", r"pickle\.load", r"weights_only=False")


def faults_of(source: str) -> list[str]:
    """What is wrong with the text of a module."""
    tree = ast.parse(source)
    faults = [pattern for pattern in FORBIDDEN if re.search(pattern, source, re.MULTILINE)]
    if source and not ast.get_docstring(tree):
        faults.append("the first line says what the file is for")
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno > 75:
            faults.append(f"functions fit on a screen: {node.name}")
    return faults


def test_a_module_has_one_topic_and_says_which():
    wrong = {name: faults_of(path.read_text()) for name, path in NAMES.items()}
    assert len(wrong) > 100
    assert not {name: faults for name, faults in wrong.items() if faults}
    bad = "def long():\n" + "    x = 1\n" * 450 + "    sys.exit()"
    assert len(faults_of(bad)) == 3, "each fault would be noticed"


def is_text_without_encoding(call: ast.Call) -> bool:
    """Whether it reads or writes a text file in the encoding of the machine, which may be ASCII."""
    if any(word.arg == "encoding" for word in call.keywords):
        return False
    name = ast.unparse(call.func)
    if name == "open":
        return not any("b" in ast.unparse(mode) for mode in call.args[1:2])
    method = name.rsplit(".")[-1]
    return method == "read_text" and not call.args or method == "write_text" and len(call.args) == 1


def texts_without_encoding(tree: ast.Module) -> list[str]:
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [ast.unparse(call) for call in calls if is_text_without_encoding(call)]


def test_text_files_are_utf_8_on_every_machine():
    wrong = {path: texts_without_encoding(tree_of(path)) for path in [*MODULES, *(ROOT / "scripts").glob("*.py")]}
    assert not {path: calls for path, calls in wrong.items() if calls}
    good = 'open(path, "rb")\npath.read_text("utf-8")\nopen(path, encoding="utf-8")\n'
    bad = 'open(path)\nopen(path, "w")\npath.read_text()\npath.write_text(text)\n'
    assert len(texts_without_encoding(ast.parse(good + bad))) == 4, "each fault would be noticed"


def test_no_path_of_a_machine_is_tracked():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("no git checkout")
    kinds = {".py", ".md", ".yaml", ".sh", ""}
    texts = [ROOT / name for name in listed.stdout.splitlines() if Path(name).suffix in kinds]
    private = re.compile(r"/(ro" r"ot|ho" r"me/\w+|wo" r"rk)/\w")
    assert not [path.name for path in texts if path.is_file() and private.search(path.read_text())]
