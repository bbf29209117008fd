"""What mkdocs does besides turning docs/*.md into pages; mkdocs.yml names this file.

Pages that live elsewhere (README.md, configs/README.md, ...) become pages of the site where they are, so nothing is
copied. The page of settings is written from the dataclasses at each build. A link to any other file of the repository
takes that file along; mkdocs, which is strict, reports a link to a file that is not there.
"""

import ast
import json
import os
import re
import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    "README.md": "index.md",
    "configs/README.md": "configurations.md",
    "configs/sgg/README.md": "detectors/scene_graph_commands.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
LINK = re.compile(r"(?<=\]\()([^)#\s]+)(?=[)#])")


def on_files(files, config):
    """Adds the pages that are not in docs/, and the files that any page links to."""
    sources = {path: path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    sources |= {ROOT / path: page for path, page in PAGES.items()}
    for path, page in PAGES.items():
        _add(files, config, page, with_links_of_the_site((ROOT / path).read_text(), ROOT / path, page))
    _add(files, config, "settings.md", settings_page())
    for source in sources:
        for target in _targets(source.read_text(), source):
            if target.is_file() and target not in sources and ROOT / "docs" not in target.parents:
                _add(files, config, _asset(target), target.read_bytes())
    return files


def on_page_markdown(markdown: str, page, config, files) -> str:
    return with_links_of_the_site(markdown, ROOT / "docs" / page.file.src_uri, page.file.src_uri)


def with_links_of_the_site(markdown: str, source: Path, page: str) -> str:
    """A page whose links to files of the repository lead to where the site has them."""

    def moved(match: re.Match) -> str:
        target = (source.parent / match[1]).resolve()
        if "://" in match[1] or ROOT not in target.parents or not target.is_file():
            return match[1]
        place = PAGES.get(target.relative_to(ROOT).as_posix()) or _asset(target)
        return os.path.relpath(place, Path(page).parent)

    return LINK.sub(moved, markdown)


def _targets(markdown: str, source: Path) -> set[Path]:
    return {(source.parent / link).resolve() for link in LINK.findall(markdown) if "://" not in link}


def _asset(target: Path) -> str:
    """Where a file goes: those of docs/ as they are, others below files/; .txt lets browsers show a source."""
    if ROOT / "docs" in target.parents:
        return target.relative_to(ROOT / "docs").as_posix()
    name = f"files/{target.relative_to(ROOT).as_posix()}"
    return name if target.suffix in (".ipynb", ".png") else f"{name}.txt"


def _add(files, config, uri: str, content: str | bytes) -> None:
    from mkdocs.structure.files import File  # here: the tests read this file without mkdocs

    if files.get_file_from_path(uri) is None:
        files.append(File.generated(config, uri, content=content))


def settings_page() -> str:
    """Every key of the command line with its default and text. Sources are read, not run: nothing heavy is imported."""
    lines = [
        "# Settings\n",
        "Written from the dataclasses in `toolkit/run/settings.py` and beside each detector. A script may set other "
        "defaults of its own (`--print_config` shows them); `--help all` shows the same texts.\n",
    ]
    common = classes_of(ROOT / "toolkit" / "run" / "settings.py")
    for name, (_, text, rows) in common.items():
        group = "eval" if name == "SceneGraphEvalConfig" else name.removesuffix("Config").lower()
        title = "eval, of scene graphs" if name == "SceneGraphEvalConfig" else group
        lines += [f"## {title}\n", f"{text}\n", *_table(group, rows)]
    lines.append("## model\n\nThe keys follow `--model.architecture`; a key of another architecture is an error.\n")
    options = {}
    of_all_detectors = ROOT / "toolkit" / "models" / "__init__.py"
    for file in (of_all_detectors, *sorted((ROOT / "toolkit").rglob("options.py"))):
        options |= classes_of(file)
    for architecture, name in options_by_architecture().items():
        lines += [f"### {architecture}\n", f"{options[name][1]}\n", *_table("model", inherited(name, options))]
    return "\n".join(lines) + "\n"


def classes_of(file: Path) -> dict[str, tuple[list[str], str, dict]]:
    """Of each dataclass of a file: its bases, its docstring, and {field: (default, text)} of its own fields."""
    found = {}
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ClassDef):
            rows = {}
            for line, after in zip(node.body, node.body[1:], strict=False):
                if isinstance(line, ast.AnnAssign) and isinstance(after, ast.Expr):
                    rows[line.target.id] = (_default(line.value), " ".join(ast.literal_eval(after.value).split()))
            found[node.name] = ([ast.unparse(base) for base in node.bases], ast.get_docstring(node), rows)
    return found


def inherited(name: str, classes: dict) -> dict:
    """The fields of a class and of those it inherits from."""
    bases, _, rows = classes[name]
    return {key: row for base in bases if base in classes for key, row in inherited(base, classes).items()} | rows


def options_by_architecture() -> dict[str, str]:
    tables = runpy.run_path(str(ROOT / "toolkit" / "index.py"))  # imports nothing of the toolkit, nor torch
    return {name: options.split(":")[1] for name, (_, options) in tables["DETECTORS"].items()}


def _default(value: ast.expr | None) -> str:
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "field":
        (factory,) = (word.value for word in value.keywords if word.arg == "default_factory")
        if not isinstance(factory, ast.Lambda):
            return {"list": "[]", "dict": "{}"}.get(factory.id, "")  # a function's list would be long
        value = factory.body
    if not isinstance(value, ast.Constant):
        return "" if value is None else ast.unparse(value)
    is_text = isinstance(value.value, str) and value.value != ""
    return value.value if is_text else json.dumps(value.value)  # as one types it: null, true


def _table(group: str, rows: dict[str, tuple[str, str]]) -> list[str]:
    lines = [f"| `{group}.{key}` | `{default or '-'}` | {text} |" for key, (default, text) in rows.items()]
    return ["| key | default | |", "|---|---|---|", *lines, ""]
