"""Change lines of the core one at a time, and see that the fast tests fail.

    python tests/mutate.py                          # 40 changes, drawn with seed 0; a table, and mutants.json
    python tests/mutate.py --count 10 --seed 3      # others
    python tests/mutate.py --near                   # only the nearest tests of each: minutes, not hours
    python tests/mutate.py --again mutants.json     # with all tests, those that survived

A change is a sign (+ for -), a bound (< for <=), a condition (its opposite, `and` for `or`) or a dropped call, in a
clone of the last commit. First the test file nearest to the module runs (`tests/which.py`), then the next few. Then all
tests run once with every change that these did not notice, and each test that fails runs again with each of these
changes by itself.
"""

import argparse
import ast
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import which
from tqdm import tqdm

CORE = ("base", "step", "data", "models", "evaluation", "run")
SIGNS = {"Add": ("+", "-"), "Sub": ("-", "+"), "Mult": ("*", "/"), "Div": ("/", "*")}
BOUNDS = {"Lt": ("<", "<="), "LtE": ("<=", "<"), "Gt": (">", ">="), "GtE": (">=", ">"), "Eq": ("==", "!=")}
BOUNDS |= {"NotEq": ("!=", "=="), "In": ("in", "not in"), "NotIn": ("not in", "in"), "Is": ("is", "is not")}
BOUNDS |= {"IsNot": ("is not", "is")}
HANGS_AFTER_S = 1800
NEAREST = 6  # test files about a module that are tried before all others
SECONDS = itertools.count(1_000_000_000)  # times of changed files


@dataclass
class Mutant:
    """One change: `before` at an offset of a file becomes `after`.

    killed_by: the test that failed; None if all passed.
    """

    file: str
    line: int
    kind: str
    offset: int
    before: str
    after: str
    killed_by: str | None = None

    @property
    def shown(self) -> str:
        before = " ".join(self.before.split())
        return f"{self.file}:{self.line} {self.kind}: {before} -> {self.after}"


class Source:
    """A file's text, with the places of its nodes as offsets."""

    def __init__(self, path: Path):
        self.file = str(path.relative_to(which.ROOT))
        self.text = path.read_text(encoding="utf-8")
        self.tree = ast.parse(self.text)
        self.starts = [0]
        for line in self.text.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))

    def offset(self, line: int, column: int) -> int:
        """Return the offset in characters; `column` counts bytes, as Python's own tree does."""
        start = self.starts[line - 1]
        text = self.text[start : self.starts[line]]
        return start + len(text.encode()[:column].decode())

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        return self.offset(node.lineno, node.col_offset), self.offset(node.end_lineno, node.end_col_offset)

    def between(self, left: ast.expr, right: ast.expr, kind: str, words: tuple[str, str]) -> Iterator[Mutant]:
        """Yield the change of the operator between two expressions."""
        before, after = words
        end = self.span(left)[1]
        gap = self.text[end : self.span(right)[0]]
        if gap.count(before) == 1:
            yield Mutant(self.file, left.end_lineno, kind, end + gap.index(before), before, after)

    def opposite(self, condition: ast.expr) -> Mutant:
        start, end = self.span(condition)
        text = self.text[start:end]
        return Mutant(self.file, condition.lineno, "condition", start, text, f"not ({text})")


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Yield every change that a file allows."""
    source = Source(path)
    for node in ast.walk(source.tree):
        match node:
            case ast.BinOp(op=operator) if type(operator).__name__ in SIGNS:
                yield from source.between(node.left, node.right, "sign", SIGNS[type(operator).__name__])
            case ast.Compare(ops=[operator], comparators=[right]) if type(operator).__name__ in BOUNDS:
                yield from source.between(node.left, right, "bound", BOUNDS[type(operator).__name__])
            case ast.BoolOp(op=ast.And(), values=[left, right]):
                yield from source.between(left, right, "condition", ("and", "or"))
            case ast.BoolOp(op=ast.Or(), values=[left, right]):
                yield from source.between(left, right, "condition", ("or", "and"))
            case ast.If(test=condition) | ast.IfExp(test=condition):
                yield source.opposite(condition)
            case ast.Expr(value=ast.Call()):
                start, end = source.span(node)
                yield Mutant(source.file, node.lineno, "dropped call", start, source.text[start:end], "pass")


def draw(count: int, seed: int) -> list[Mutant]:
    """Draw changes: a kind after the other, each of another file as long as there are files."""
    by_kind = {}
    for layer in CORE:
        for path in sorted((which.ROOT / "toolkit" / layer).rglob("*.py")):
            for mutant in mutants_of(path):
                by_kind.setdefault(mutant.kind, []).append(mutant)
    rng = random.Random(seed)
    drawn = []
    while len(drawn) < count:
        kind = sorted(by_kind)[len(drawn) % len(by_kind)]
        used = {mutant.file for mutant in drawn}
        choice = [mutant for mutant in by_kind[kind] if mutant.file not in used] or by_kind[kind]
        drawn.append(rng.choice(choice))
    return drawn


def failures(project: Path, arguments: list[str], processes: int) -> list[str]:
    """Run tests on a number of processes; return what pytest says of those that failed."""
    how = ["-n", str(processes), "--dist", "loadfile", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *how, *arguments]
    environment = os.environ | {"PYTHONPATH": str(project), "PYTHONDONTWRITEBYTECODE": "", "OMP_NUM_THREADS": "1"}
    try:
        ended = subprocess.run(
            command, cwd=project, env=environment, capture_output=True, text=True, timeout=HANGS_AFTER_S
        )
    except subprocess.TimeoutExpired:
        return [f"hangs after {HANGS_AFTER_S} s"]
    if ended.returncode == 0:
        return []
    failed = [line for line in ended.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed or [ended.stdout[-300:] + ended.stderr[-300:]]


def first_failure(project: Path, tests: list[str]) -> str | None:
    """Return what pytest says of the first of these tests that fails, None if all pass."""
    failed = failures(project, ["-x", *tests], processes=min(2, len(tests) - 1))  # 0: without further processes
    return failed[0] if failed else None


def names_of(failed: list[str]) -> list[str]:
    """Return the names of tests, or of whole files, in what pytest says of them."""
    names = []
    for line in failed:
        if line.startswith(("FAILED", "ERROR")):
            names.append(line.split(" ", 1)[1].split(" - ")[0])
    return names


@contextmanager
def changed(mutants: list[Mutant], project: Path) -> Iterator[None]:
    """Make changes in a clone, and take them back."""
    texts = {}
    # From the end of a file, so that the offsets of the others stay right.
    for mutant in sorted(mutants, key=lambda each: -each.offset):
        path = project / mutant.file
        text = path.read_text(encoding="utf-8")
        texts.setdefault(path, text)
        end = mutant.offset + len(mutant.before)
        assert text[mutant.offset : end] == mutant.before, f"{mutant.file} has changed since: {mutant.shown}"
        write(path, text[: mutant.offset] + mutant.after + text[end:])
    try:
        yield
    finally:
        for path, text in texts.items():
            write(path, text)


def write(path: Path, text: str) -> None:
    """Write a module, with a time that no earlier version of it had: its bytecode is judged by time and length."""
    path.write_text(text, encoding="utf-8")
    second = next(SECONDS)
    os.utime(path, (second, second))


def judge_by_nearest(mutant: Mutant, project: Path) -> None:
    """Run the nearest tests of a change."""
    tests = which.tests_of(which.module_name(which.ROOT / mutant.file))
    near = [str(test.relative_to(which.ROOT)) for test in tests[:NEAREST]]
    with changed([mutant], project):
        mutant.killed_by = first_failure(project, near[:1])
        if mutant.killed_by is None and len(near) > 1:
            mutant.killed_by = first_failure(project, near[1:])


def judge_together(mutants: list[Mutant], project: Path) -> None:
    """Run all tests with all changes at once, as long as that finds another change that a test notices."""
    left = list(mutants)
    while left:
        with changed(left, project):
            failed = names_of(failures(project, [], processes=2))
        for mutant in tqdm(left if failed else [], unit="mutant"):
            with changed([mutant], project):
                mutant.killed_by = first_failure(project, failed)
        still_left = [mutant for mutant in left if mutant.killed_by is None]
        if len(still_left) == len(left):
            return
        left = still_left


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=40, help="number of changes (default 40)")
    parser.add_argument("--seed", type=int, default=0, help="which are drawn (default 0)")
    parser.add_argument("--near", action="store_true", help="run only the nearest tests of each change")
    parser.add_argument("--again", type=Path, help="file of an earlier call: its survivors")
    parser.add_argument(
        "--out", type=Path, default=Path("mutants.json"), help="what became of each (default mutants.json)"
    )
    args = parser.parse_args()
    mutants = draw(args.count, args.seed)
    if args.again is not None:
        found = [Mutant(**fields) for fields in json.loads(args.again.read_text())]
        mutants = [mutant for mutant in found if mutant.killed_by is None]
    with tempfile.TemporaryDirectory() as folder:
        project = Path(folder) / "project"
        subprocess.run(["git", "clone", "--quiet", which.ROOT, project], check=True)
        for mutant in tqdm([] if args.again else mutants, unit="mutant"):
            judge_by_nearest(mutant, project)
            args.out.write_text(json.dumps([asdict(each) for each in mutants], indent=1))
        if not args.near:
            judge_together([mutant for mutant in mutants if mutant.killed_by is None], project)
    args.out.write_text(json.dumps([asdict(each) for each in mutants], indent=1))
    for mutant in mutants:
        print(f"{mutant.shown}\n    {mutant.killed_by or 'SURVIVED'}")
    killed = sum(mutant.killed_by is not None for mutant in mutants)
    print(f"{killed} of {len(mutants)} were noticed; {args.out} names the tests")
    return 0 if killed == len(mutants) else 1


if __name__ == "__main__":
    sys.exit(main())
