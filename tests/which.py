"""Name the test files that are about a module of the toolkit, those of the fewest modules first.

    make which FILE=toolkit/data/table.py

A test file is about a module if it has the module's name and folder, or imports it, itself or through `tests/support`.
If no test imports the module, the tests of its folder are named.
"""

import ast
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@cache
def imported_names(path: Path) -> set[str]:
    """Return the dotted names that a file imports, modules and what is taken from them."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def module_name(path: Path) -> str:
    """`toolkit/data/table.py` is `toolkit.data.table`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


def modules_of_toolkit() -> dict[str, Path]:
    return {module_name(path): path for path in sorted((ROOT / "toolkit").rglob("*.py"))}


def modules_of_tests() -> dict[Path, set[str]]:
    """Return the modules of the toolkit that each test file imports, itself or through `tests/support`."""
    modules = modules_of_toolkit()
    support = {path.stem: path for path in sorted((ROOT / "tests" / "support").glob("*.py"))}
    found = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        names = imported_names(path)
        waiting = sorted(names & support.keys())
        seen = set()
        while waiting:
            helper = waiting.pop()
            seen.add(helper)
            more = imported_names(support[helper])
            names |= more
            waiting += sorted((more & support.keys()) - seen)
        found[path] = names & modules.keys()
    return found


def mirror_of(module: str) -> Path:
    """Return the place of the tests of a module: of `toolkit.data.table`, `tests/data/test_table.py`."""
    *folders, name = module.split(".")[1:] or ["toolkit"]
    return ROOT.joinpath("tests", *folders, f"test_{name}.py")


def tests_of(module: str, of_tests: dict[Path, set[str]] | None = None) -> list[Path]:
    """Return the test files about a module, that of its name first; raise KeyError if there is no such module.

    of_tests: what `modules_of_tests` returned, where many modules are asked for.
    """
    if module not in modules_of_toolkit():
        raise KeyError(module)
    # First those that import the least: a test of many modules is seldom about one of them.
    of_tests = dict(sorted((of_tests or modules_of_tests()).items(), key=lambda item: len(item[1])))
    own = mirror_of(module)
    near = [path for path, names in of_tests.items() if module in names and path != own]
    if own in of_tests:
        return [own, *near]
    return near or [path for path in of_tests if own.parent in path.parents]


def main(files: Iterable[str]) -> int:
    for file in files:
        try:
            tests = tests_of(module_name((ROOT / file).resolve()))
        except (KeyError, ValueError):
            print(
                f"{file} is not a module of toolkit/; expected a path such as FILE=toolkit/data/table.py",
                file=sys.stderr,
            )
            return 2
        names = [str(path.relative_to(ROOT)) for path in tests]
        print("\n".join(names))
        print(f'\nmake test ARGS="{" ".join(names)}"')
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
