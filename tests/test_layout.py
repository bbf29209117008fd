"""The promises of the tree: short files and functions, scripts that show their loop, nothing private left behind."""

import ast
import graphlib
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TRAINING = sorted((ROOT / "scripts").glob("train_*.py"))
MODULES = sorted((ROOT / "toolkit").rglob("*.py"))


def test_a_training_script_is_its_loop():
    """And the loop of the first, which that of the others is (tests/test_drift.py), has the order of docs/design.md."""
    for path in TRAINING:
        source = path.read_text()
        tree = ast.parse(source)
        assert source.count("\n") <= 130 and max(map(len, source.splitlines())) <= 110 and "fmt: skip" not in source
        functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
        epoch, main = functions["train_one_epoch"], functions["main"]
        assert epoch.end_lineno - epoch.lineno < 40 and main.end_lineno - main.lineno < 25
        assert "accelerate launch scripts/" in ast.get_docstring(tree), "opens with the commands that run it"
        calls = [(node.lineno, ast.unparse(node.func)) for node in ast.walk(epoch) if isinstance(node, ast.Call)]
        order = ["t.guard.snapshot", "t.model", "t.detector.criterion", "t.weigh", "t.accelerator.backward"]
        order += ["reduce_dict", "t.accepts", "t.optimizer.step", "t.note_step", "t.ema.update", "t.evaluate_and_save"]
        assert [name for _, name in sorted(calls) if name in order] == order
        assert not {name for _, name in calls} & {"print", "exec", "eval"}


# Who may import whom: rooms below, and what plain types and files of theirs others may use. docs/design.md draws it.
LOOSE = {"batch", "box_ops", "boxes", "detect", "distributed", "draws", "errors", "files", "imports", "signals", "text",
         "trust"}
ROOMS = {
    "step": set(),
    "runs": {"data.table"},
    "data": set(),
    "evaluation": {"data.table", "data.decoding", "data.formats.coco", "runs.metrics_log", "runs.settings_file",
                   "step.freezing"},
    "models": {"step", "runs", "data.table"},
    "use": {"step", "runs", "data", "evaluation", "models"},
    "scene_graphs": {"step", "runs", "data", "evaluation", "models"},
}
# A cell of settings is a command line, so what notebooks share stands where scripts do.
LIKE_A_SCRIPT = {"use.notebook": "command_line"}
# Beside these, who opens the room of scene graphs, and where; `models` has a table that names its detectors.
DOORS = {
    "data.formats": "scene_graphs.readers",
    "evaluation.report.judgement": "scene_graphs.report",
    "use.outputs": "scene_graphs.formats",
}
TOP = ["command_line", "log", "saving", "recovery", "validation", "training", "session", "replay_session"]


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


def may_import(importer: str, module: str) -> bool:
    room, target = importer.split(".")[0], module.split(".")[0]
    if target in LOOSE or module in (DOORS.get(importer), LIKE_A_SCRIPT.get(importer)):
        return True
    if room in ROOMS:
        return target == room or target in ROOMS[room] or module in ROOMS[room]
    if room in TOP:
        return target in ROOMS and target != "scene_graphs" or target in TOP and TOP.index(target) < TOP.index(room)
    return False


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT / "toolkit").with_suffix("").parts).removesuffix("__init__").rstrip(".")


def test_no_circle_of_imports():
    graph = {name: {m for m in imported(path, inside=False) if not f"{name}.".startswith(f"{m}.")}
             for name, path in zip(map(name_of, MODULES), MODULES, strict=True)}  # fmt: skip
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names it
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(graph | {"errors": {"session"}}).prepare()


def test_arrows_point_one_way_and_others_would_be_noticed():
    wrong = {name_of(path): sorted(m for m in imported(path) if not may_import(name_of(path), m)) for path in MODULES}
    assert not {name: modules for name, modules in wrong.items() if modules}, "must not import these"
    for importer, module in (("data.table", "evaluation.coco"), ("batch", "data.table"), ("saving", "training"),
                             *((room, "scene_graphs.matches") for room in (*ROOMS, *TOP) if room != "scene_graphs")):
        assert not may_import(importer, module)  # fmt: skip


def test_nothing_opens_the_room_of_scene_graphs_but_by_its_doors():
    """Neither by a name in a text, as a table of detectors has it; and no door is left that nobody uses."""
    outside = {name_of(path): path for path in MODULES if not name_of(path).startswith("scene_graphs")}
    naming = {name for name, path in outside.items() if re.search(r"[\w.]\.scene_graphs\b", path.read_text())}
    assert naming == {*DOORS, "models"}


def test_only_the_session_reads_settings():
    groups = {"run", "data", "model", "optim", "schedule", "loss", "eval"}

    def reads(node: ast.AST) -> bool:
        return isinstance(node, ast.Attribute) and node.attr in groups and ast.unparse(node.value).endswith("config")

    readers = [path.name for path in MODULES if any(map(reads, ast.walk(ast.parse(path.read_text()))))]
    assert readers == ["session.py", "notebook.py"], "the second says where a run lies, for the cells that follow"


def faults_of(source: str) -> list[str]:
    """What is wrong with the text of a module."""
    tree = ast.parse(source)
    faults = ["the first line says what the file is for"] * bool(source and not ast.get_docstring(tree))
    faults += ["a file has one topic, and at most 450 lines"] * (source.count("\n") > 450)
    faults += [f"functions fit on a screen: {node.name}" for node in ast.walk(tree)
               if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno > 75]  # fmt: skip
    # what the toolkit must not hold, as patterns to find it by: none of them is called here
    forbidden = (r"\bpdb\b", r"except:\s*$", r"sys\.exit", r"pickle\.load", r"weights_only=False")
    return faults + [pattern for pattern in forbidden if re.search(pattern, source, re.MULTILINE)]


def test_a_module_has_one_topic_and_says_which():
    wrong = {str(path.relative_to(ROOT)): faults_of(path.read_text()) for path in MODULES}
    assert len(wrong) > 100 and not {path: faults for path, faults in wrong.items() if faults}
    bad = "def long():\n" + "    x = 1\n" * 450 + "    sys.exit()"
    assert len(faults_of(bad)) == 4, "each fault would be noticed"


def test_no_path_of_a_machine_is_tracked():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("no git checkout")
    kinds = {".py", ".md", ".yaml", ".sh", ""}
    texts = [ROOT / name for name in listed.stdout.splitlines() if Path(name).suffix in kinds]
    private = re.compile(r"/(ro" r"ot|ho" r"me/\w+|wo" r"rk)/\w")
    assert not [path.name for path in texts if path.is_file() and private.search(path.read_text())]
