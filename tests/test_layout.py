"""The promises of the tree: three layers, short functions, scripts that show their loop, nothing private left."""

import ast
import graphlib
import re
import subprocess
from pathlib import Path

import pytest
from places import ROOT

from toolkit import index

TRAINING = sorted((ROOT / "scripts").glob("train_*.py"))
MODULES = sorted((ROOT / "toolkit").rglob("*.py"))


def test_a_training_script_is_its_loop():
    """And the loop of the first, which that of the others is (tests/test_drift.py), has the order of docs/design.md."""
    for path in TRAINING:
        source = path.read_text()
        tree = ast.parse(source)
        assert source.count("\n") <= 130 and max(map(len, source.splitlines())) <= 110 and "fmt: skip" not in source
        functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
        epoch, train, main = (functions[name] for name in ("train_one_epoch", "train", "main"))
        assert epoch.end_lineno - epoch.lineno < 40 and max(f.end_lineno - f.lineno for f in (train, main)) < 25
        assert "accelerate launch scripts/" in ast.get_docstring(tree), "opens with the commands that run it"
        calls = [(node.lineno, ast.unparse(node.func)) for node in ast.walk(epoch) if isinstance(node, ast.Call)]
        order = ["t.windows", "t.model", "t.detector.criterion", "t.loss_weights", "window.reduce", "t.guard.accepts"]
        order += ["window.clip", "t.optimizer.step", "t.ema.update", "t.meters.update"]
        assert [name for _, name in sorted(calls) if name in order] == order
        assert not {name for _, name in calls} & {"print", "exec", "eval"}


# The core, room by room: what each may import beside `base` and `index`, as rooms or as single modules. docs/design.md
# draws it.
CORE = {
    "base": set(),
    "step": set(),
    "data": set(),
    "evaluation": {"data.table", "data.tile_table", "models.joined_tiles", "step.execution", "step.freezing"},
    "models": {"step", "data.table", "run.checkpoint_content", "run.layers", "run.open_run", "run.settings_check",
               "run.settings_file"},
    "run": {"step", "data", "evaluation", "models"},
}
# The modules of `run` that the loop is made of, each of which may import those before it. The others keep the files and
# processes of a run, and import none of these.
LOOP = ["command_line", "log", "saving", "training_window", "recovery", "validation", "loop", "training",
        "session_build", "session_begin", "session_end", "session"]
# Detectors that are built on others, and tools whose subject is one family of detectors.
FAMILIES = {
    "detectors.scene_graphs": {"detectors.detr", "detectors.faster_rcnn"},
    "tools.anchors": {"detectors.yolov3"},
    "tools.distillation": {"detectors.detr"},
    "tools.export": {"detectors.faster_rcnn"},
    "tools.predict": {"detectors.scene_graphs"},
}


def imported(path: Path, inside: bool = True) -> set[str]:
    """Modules of the toolkit that a file imports, without `toolkit.`; inside: also in functions."""
    tree, modules = ast.parse(path.read_text()), set()
    for node in ast.walk(tree) if inside else tree.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "toolkit":
            room = node.module.partition(".")[2]
            files = {f"{room}.{alias.name}".strip(".") for alias in node.names}
            modules |= {f for f in files if (ROOT / "toolkit" / f"{f.replace('.', '/')}.py").exists() or not room}
            modules |= {room} - {""}
    return modules


def layer_of(module: str) -> str:
    first = module.split(".")[0]
    return first if first in ("detectors", "tools") else "core"


def is_below(module: str, rooms: set[str]) -> bool:
    return any(f"{module}.".startswith(f"{room}.") for room in rooms)


def may_import(importer: str, module: str) -> bool:
    """The rule of the house: the core imports neither detectors nor tools, a detector the core, a tool the core."""
    layer, target = layer_of(importer), layer_of(module)
    if layer == "core":
        return target == "core" and core_may_import(importer, module)
    if target == "core":
        return True
    if target == "tools":
        return layer == "tools"
    family = ".".join(importer.split(".")[:2])
    allowed = set().union(*(families for name, families in FAMILIES.items() if is_below(importer, {name})))
    return is_below(module, allowed | ({family} if layer == "detectors" else set()))


def core_may_import(importer: str, module: str) -> bool:
    room, target = importer.split(".")[0], module.split(".")[0]
    if target == "base" or module == "index" and room != "base":
        return True
    if room != "run" or target != "run":
        return target == room or is_below(module, CORE.get(room, set()))
    name, other = importer.removeprefix("run."), module.removeprefix("run.")
    if other not in LOOP:
        return True
    return name in LOOP and LOOP.index(other) < LOOP.index(name)


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT / "toolkit").with_suffix("").parts).removesuffix("__init__").rstrip(".")


def test_no_circle_of_imports():
    graph = {name: {m for m in imported(path, inside=False) if not f"{name}.".startswith(f"{m}.")}
             for name, path in zip(map(name_of, MODULES), MODULES, strict=True)}  # fmt: skip
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names it
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(graph | {"base.errors": {"run.session"}}).prepare()


def test_arrows_point_one_way_and_others_would_be_noticed():
    wrong = {name_of(path): sorted(m for m in imported(path) if not may_import(name_of(path), m)) for path in MODULES}
    assert not {name: modules for name, modules in wrong.items() if modules}, "must not import these"
    forbidden = (
        ("data.table", "evaluation.coco"), ("base.batch", "data.table"), ("run.saving", "run.training"),
        ("run.checkpoint", "run.session"), ("run.session", "tools.export"), ("models.start", "detectors.detr.options"),
        ("detectors.ssd.model", "detectors.yolov3.model"), ("detectors.detr.detr", "tools.report"),
        ("tools.report.page", "detectors.detr.options"), ("step.guard", "models.detector"), ("base.text", "index"),
    )  # fmt: skip
    for importer, module in forbidden:
        assert not may_import(importer, module), f"{importer} must not import {module}"


def test_each_exception_of_the_rule_is_needed():
    used = set()
    for path in MODULES:
        for name, families in FAMILIES.items():
            if is_below(name_of(path), {name}):
                used |= {(name, family) for family in families if any(is_below(m, {family}) for m in imported(path))}
    assert used == {(name, family) for name, families in FAMILIES.items() for family in families}


def test_the_core_names_what_lies_outside_in_its_index_alone():
    """Neither by a name in a text, as a table of detectors has it."""
    names = re.compile(r"^(?!.*`).*toolkit\.(detectors|tools)\.", re.MULTILINE)  # not in docstrings and comments
    core = {name_of(path): path for path in MODULES if layer_of(name_of(path)) == "core"}
    assert {name for name, path in core.items() if names.search(path.read_text())} == {"index"}


def test_everything_in_the_index_is_there():
    pairs = [reference for references in index.DETECTORS.values() for reference in references]
    tables = (index.READERS, index.RECIPES, index.WEIGHT_FILES, index.TRACKERS, index.TOOLS, index.REPORT_STATISTICS)
    single = [reference for table in tables for reference in table.values()]
    for reference in (*pairs, *single, *index.PUBLISHERS, index.OTHER_TRACKERS):
        assert index.load(reference) is not None
    for _, options in index.DETECTORS.values():  # the command line tells families apart by the module that is named
        assert index.load(options).__module__ == options.partition(":")[0]


def test_only_the_session_reads_settings():
    groups = {"run", "data", "model", "optim", "schedule", "loss", "eval"}

    def reads(node: ast.AST) -> bool:
        return isinstance(node, ast.Attribute) and node.attr in groups and ast.unparse(node.value).endswith("config")

    readers = [path.name for path in MODULES if any(map(reads, ast.walk(ast.parse(path.read_text()))))]
    of_session = sorted(path.name for path in (ROOT / "toolkit" / "run").glob("session*.py"))
    assert readers == [*of_session, "notebook.py"], "the last says where a run lies, for the cells that follow"


def faults_of(source: str) -> list[str]:
    """What is wrong with the text of a module."""
    tree = ast.parse(source)
    faults = ["the first line says what the file is for"] * bool(source and not ast.get_docstring(tree))
    faults += [f"functions fit on a screen: {node.name}" for node in ast.walk(tree)
               if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno > 75]  # fmt: skip
    # what the toolkit must not hold, as patterns to find it by: none of them is called here
    forbidden = (r"\bpdb\b", r"except:\s*$", r"sys\.exit", r"pickle\.load", r"weights_only=False")
    return faults + [pattern for pattern in forbidden if re.search(pattern, source, re.MULTILINE)]


def test_a_module_has_one_topic_and_says_which():
    wrong = {str(path.relative_to(ROOT)): faults_of(path.read_text()) for path in MODULES}
    assert len(wrong) > 100 and not {path: faults for path, faults in wrong.items() if faults}
    bad = "def long():\n" + "    x = 1\n" * 450 + "    sys.exit()"
    assert len(faults_of(bad)) == 3, "each fault would be noticed"


def texts_without_encoding(source: str) -> list[str]:
    """Calls that read or write a text file in the encoding of the machine, which may be ASCII."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or any(word.arg == "encoding" for word in node.keywords):
            continue
        name = ast.unparse(node.func).rsplit(".")[-1]
        is_text = {"read_text": not node.args, "write_text": len(node.args) == 1}.get(name, False)
        if ast.unparse(node.func) == "open":
            modes = [ast.unparse(argument) for argument in node.args[1:2]]
            is_text = not any("b" in mode for mode in modes)
        if is_text:
            found.append(ast.unparse(node))
    return found


def test_text_files_are_utf_8_on_every_machine():
    files = [*MODULES, *(ROOT / "scripts").glob("*.py")]
    wrong = {str(path.relative_to(ROOT)): texts_without_encoding(path.read_text()) for path in files}
    assert not {path: calls for path, calls in wrong.items() if calls}
    good = 'open(path, "rb")\npath.read_text("utf-8")\nopen(path, encoding="utf-8")\n'
    bad = 'open(path)\nopen(path, "w")\npath.read_text()\npath.write_text(text)\n'
    assert len(texts_without_encoding(good + bad)) == 4, "each fault would be noticed"


def test_no_path_of_a_machine_is_tracked():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("no git checkout")
    kinds = {".py", ".md", ".yaml", ".sh", ""}
    texts = [ROOT / name for name in listed.stdout.splitlines() if Path(name).suffix in kinds]
    private = re.compile(r"/(ro" r"ot|ho" r"me/\w+|wo" r"rk)/\w")
    assert not [path.name for path in texts if path.is_file() and private.search(path.read_text())]
