"""Files written whole or not at all, JSON that keeps every float, and the number of usable cores."""

import json
import math
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import yaml

from toolkit.base.errors import BadInput
from toolkit.base.text import did_you_mean, first_names

PACKAGE = Path(__file__).resolve().parent.parent
# A wheel has scripts/ and configs/ inside the package; in a checkout they stand beside it.
ROOT = PACKAGE if (PACKAGE / "scripts").is_dir() else PACKAGE.parent
MAX_IMAGE_PIXELS = 100_000_000  # default of data.max_image_pixels: 300 MB decoded
MAX_YAML_SIZE = 1_000_000  # letters and nodes of a YAML file after its aliases are expanded
STALLED_S = 30.0  # seconds of waiting for a disk before a message
_NONFINITE = "__nonfinite__"  # key of an encoded float that strict JSON cannot hold


def shown_path(path: Path | str) -> str:
    """Return a path as a user would type it: relative to the current folder if it lies below it."""
    path = Path(os.path.abspath(path))
    here = Path.cwd()
    return str(path.relative_to(here) if here in path.parents else path)


def near_names(path: Path) -> str:
    """Return the end of a message about a path that does not exist: "; did you mean ...?" with up to 3 similar names.

    If no name is similar, the end lists the first names in the nearest folder above the path that exists.
    """
    path = Path(path).expanduser()
    absolute = path.absolute()
    folder = next(parent for parent in absolute.parents if parent.is_dir())
    missing = absolute.relative_to(folder).parts
    name = missing[0]
    given = Path(*path.parts[: len(path.parts) - len(missing)])  # the folder as it was given
    try:
        names = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
    except OSError:
        return ""
    stem = without_suffix(name)  # an equal suffix alone does not make a name similar
    similar = [other for other in names if did_you_mean(stem, [without_suffix(other)])]
    listed = f"{given}{os.sep} contains {first_names(names, 5)}" if names else ""
    return did_you_mean(name, similar, otherwise=listed, written=lambda near: str(given / near), most=3)


def distinct(names: Iterable[str], same: Callable[[str], str] = str) -> list[str]:
    """Return the names with repeated ones made distinct: the second a.jpg becomes a_2.jpg.

    same: two names count as equal if this function returns the same text for both, for example `str.casefold`.
    """
    used = set()
    chosen = []
    for name in names:
        stem, suffix = os.path.splitext(name)
        number = 1
        while same(name) in used:
            number += 1
            name = f"{stem}_{number}{suffix}"
        used.add(same(name))
        chosen.append(name)
    return chosen


def _folders_in(folder: str) -> list[str]:
    """Return the names of the folders directly in a folder, sorted; links to folders are among them."""
    for _, names, _ in os.walk(folder):
        return sorted(names)
    return []


def folders_below(folder: Path, folders_in: Callable[[str], Iterable[str]] = _folders_in) -> list[Path]:
    """Return a folder and all folders in it, sorted; links to folders are followed. None if the folder does not exist.

    Each folder is listed once, under its own path rather than that of a link. A link to a folder that contains `folder`
    is not followed, because everything in the containing folder would be listed too.

    folders_in: returns the names of the folders directly in a folder, sorted, with the links to folders.
    """
    top = os.path.realpath(folder)
    seen: set[str] = set()
    found = []
    links = [str(folder)] if os.path.isdir(folder) else []
    while links:
        start = links.pop(0)
        if start != str(folder):
            target = os.path.realpath(start).rstrip(os.sep) + os.sep
            if (top + os.sep).startswith(target):  # a link to a folder that contains `folder`
                continue
        waiting = [start]
        while waiting:
            parent = waiting.pop()
            real = os.path.realpath(parent)
            if real in seen:
                continue
            seen.add(real)
            found.append(Path(parent))
            inner = [os.path.join(parent, name) for name in folders_in(parent)]
            links += [path for path in inner if os.path.islink(path)]
            waiting += [path for path in reversed(inner) if not os.path.islink(path)]
    return sorted(found)


def without_suffix(name: str) -> str:
    """Return a path without its suffix."""
    return os.path.splitext(name)[0]


def read_json(path: Path, kind: type = dict):
    """Read a JSON file and return its content.

    Raises BadInput if the file cannot be read or parsed, or if its outermost value is not of the Python type `kind`.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BadInput(f"{path}: cannot be read: {error}") from error
    if not isinstance(content, kind):
        raise BadInput(f"{path}: cannot be read: it holds a {type(content).__name__}; expected a {kind.__name__}")
    return content


def read_json_object(path: Path) -> dict:
    """Read the object in a JSON file; return an empty dict if `read_json` would raise BadInput."""
    try:
        return read_json(path)
    except BadInput:
        return {}


def read_yaml(path: Path, where: str, what: str = "YAML"):
    """Read a YAML file without running code from it, and return its content.

    where: the file, as error messages name it. what: the kind of file in error messages, "cannot be read as <what>".

    Raises BadInput if the file cannot be read or parsed, has a key twice, or has aliases that contain themselves or
    expand to more than `MAX_YAML_SIZE`.
    """
    try:
        return parse_yaml(Path(path).expanduser().read_text(encoding="utf-8"), _Loader)
    except FileNotFoundError as error:
        raise BadInput(f"{where}: no such file{near_names(path)}") from error
    except IsADirectoryError as error:
        raise BadInput(f"{where}: this is a folder; expected a file") from error
    except OSError as error:
        raise BadInput(f"{where}: cannot be read as {what}: {error.strerror}") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise BadInput(f"{where}: cannot be read as {what}: {_yaml_fault(error)}") from error


def _yaml_fault(error: Exception) -> str:
    """Return what is wrong with a YAML file, its line and column, and that line with a mark below it."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return str(error)
    begun = error.context_mark
    context = f" ({error.context} of line {begun.line + 1})" if begun is not None and error.context else ""
    place = f"line {mark.line + 1}, column {mark.column + 1}"
    return f"{place}: {error.problem}{context}\n{mark.get_snippet() or ''}".rstrip()


class YamlLoader(yaml.SafeLoader):
    """A YAML loader that raises yaml.YAMLError for every value that it cannot construct.

    PyYAML's own loaders raise ValueError, KeyError and others for values such as `2001-99-99`, `!!int x`, `!!bool x` or
    a whole number of 5,000 digits.
    """

    def construct_object(self, node, deep=False):
        try:
            return super().construct_object(node, deep)
        except (ValueError, KeyError, AttributeError, TypeError, OverflowError) as error:
            kind = node.tag.rpartition(":")[2]
            problem = f"this cannot be read as {kind} ({str(error)[:80]})"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from error


# As in YAML 1.2 and JSON, 1e-3 is a number; PyYAML asks for the dot of 1.0e-3.
YamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def parse_yaml(text: str, loader: type[YamlLoader] = YamlLoader):
    """Parse a YAML text and return its content. Raises yaml.YAMLError if it is not valid or nested too deep."""
    try:
        return yaml.load(text, loader)  # noqa: S506 - a SafeLoader
    except RecursionError as error:
        raise yaml.YAMLError("nested too deep") from error


class _Loader(YamlLoader):
    """A YAML loader that refuses duplicate keys, and aliases that fill the memory, both of which PyYAML accepts."""

    def __init__(self, stream):
        super().__init__(stream)
        self.sizes: dict[yaml.Node, int] = {}

    def compose_node(self, parent, index):
        is_alias = self.check_event(yaml.AliasEvent)
        node = super().compose_node(parent, index)
        if not is_alias:
            size = 1
            for entry in node.value:  # a letter, a node, or the nodes of a key and its value
                parts = entry if isinstance(entry, tuple) else (entry,)
                size += sum(1 if isinstance(part, str) else self.sizes[part] for part in parts)
            self.sizes[node] = size
        if self.sizes.get(node, math.inf) > MAX_YAML_SIZE:
            raise yaml.composer.ComposerError(None, None, "it contains itself, or far too much", node.start_mark)
        return node

    def compose_mapping_node(self, anchor):
        node = super().compose_mapping_node(anchor)
        keys = set()
        for key, _ in node.value:
            name = (key.tag, str(key.value))
            if name in keys:
                raise yaml.composer.ComposerError(None, None, f"the key {key.value} appears twice", key.start_mark)
            keys.add(name)
        return node


def fsync_folder(folder: Path) -> None:
    """Make the names in `folder` durable (a rename survives a power cut only after this). A no-op on Windows.

    If `folder` is a file, its content is made durable instead.
    """
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text_atomic(path: Path, text: str) -> None:
    """Write `text` (UTF-8) so that a reader, or a crash at any moment, finds the whole old or the whole new file.

    Raises:
        OSError: the file cannot be written (no space, no right to write, ...); the old file is unchanged.
    """
    path = Path(path)
    descriptor, temp = tempfile.mkstemp(dir=path.parent, prefix=f".tmp-{path.name}-")
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temp, 0o644)  # mkstemp makes 0600; a run folder is to be read by colleagues
        os.replace(temp, path)
    except BaseException:
        Path(temp).unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


def write_json_atomic(path: Path, obj) -> None:
    """Write `obj` as indented strict JSON with `write_text_atomic`.

    Raises:
        ValueError, TypeError: NaN, infinity or a value that JSON cannot hold; see `replace_nonfinite`.
    """
    write_text_atomic(path, json.dumps(obj, indent=2, allow_nan=False) + "\n")


def replace_nonfinite(obj):
    """Return a copy of `obj` in which every NaN and every infinite float is None, so that strict JSON can hold it.

    Dicts, lists and tuples are searched at any depth; tuples become lists.
    """
    if isinstance(obj, float):
        return obj if math.isfinite(obj) else None
    if isinstance(obj, dict):
        return {key: replace_nonfinite(value) for key, value in obj.items()}
    if isinstance(obj, list | tuple):
        return [replace_nonfinite(value) for value in obj]
    return obj


def encode_json(value, where: str = "value"):
    """Return a copy of `value` that strict JSON can hold and from which `decode_json` restores the value.

    Floats are restored to the last bit, NaN and infinities included. Tuples are restored as lists, and NumPy scalars as
    Python numbers.

    Raises:
        TypeError: a value that JSON cannot hold (tensors, keys other than strings). The message says where it is, such
            as `value['a'][0]`, beginning with the name `where`.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {_NONFINITE: repr(value)}
    if isinstance(value, list | tuple):
        return [encode_json(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, Mapping):
        only_texts = all(isinstance(key, str) for key in value)
        if only_texts and _NONFINITE not in value:
            return {key: encode_json(item, f"{where}[{key!r}]") for key, item in value.items()}
        raise TypeError(f"{where} has keys other than strings ({list(value)[:5]}), which JSON cannot keep")
    raise TypeError(f"{where} is a {type(value).__name__}, which JSON cannot keep")


def decode_json(value):
    """Return the value from which `encode_json` made `value`."""
    if isinstance(value, dict):
        if value.keys() == {_NONFINITE}:
            return float(value[_NONFINITE])
        return {key: decode_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [decode_json(item) for item in value]
    return value


@contextmanager
def warn_if_stalled(what: str, say: Callable[[str], None]) -> Iterator[None]:
    """Call `say` once with a message if the block takes longer than `STALLED_S`, for example because of a stalled disk.

    what: what the block waits for, for the message.
    """
    timer = threading.Timer(STALLED_S, say, [_stalled(what)])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def with_stall_warnings(items: Iterable, what: str) -> Iterator:
    """Yield the items, and print one message to stderr for each item that takes longer than `STALLED_S` to arrive.

    what: what the items wait for, for the message. One thread watches all items.
    """
    began = None
    ended = threading.Event()

    def watch() -> None:
        reported = None
        wait_s = STALLED_S
        while not ended.wait(wait_s):
            since = began
            wait_s = STALLED_S
            waited_s = 0.0 if since in (None, reported) else time.monotonic() - since
            if waited_s < STALLED_S:
                wait_s -= waited_s
            else:
                reported = since
                _say(_stalled(what))

    threading.Thread(target=watch, name="stalled", daemon=True).start()
    try:
        began = time.monotonic()
        for item in items:
            began = None
            yield item
            began = time.monotonic()
    finally:
        ended.set()


def _stalled(what: str) -> str:
    return f"still waiting for the disk, for {STALLED_S:g} s now: {what}; the run goes on when it answers"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def usable_cores() -> int:
    """Return the number of logical cores that this process may use; all cores if it is not known (macOS)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def write_json(path: Path, content: object) -> None:
    """Write `content` as JSON on one line with `write_text_atomic`.

    Unlike `write_json_atomic` this accepts NaN and infinities, which the ids of defective data may be.
    """
    write_text_atomic(path, json.dumps(content))
