"""A COCO file of any length as rows of a table, by way of a database on disk: memory for a few thousand images.

The file is read once, item by item, into SQLite; then a few thousand images at a time become small COCO documents with
their annotations and relations, each of which goes through the same validation as a whole file. What depends on other
images (ids or names used twice, annotations and relations that point nowhere or across images) is collected into one
document of its own, the knot, so that chunks see all that concerns them.
"""

import contextlib
import dataclasses
import functools
import marshal
import os
import re
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from toolkit.data.box_formats import BoxFormats
from toolkit.data.check_files import (
    depth,
    find_image_root,
    image_checker,
    image_names,
    parallel,
    unlisted_problems,
    waits_for,
)
from toolkit.data.checks import Document, validate_document
from toolkit.data.formats.json_stream import Whole, items_of, stream_lists
from toolkit.data.places import Places, digest_of, watched_of
from toolkit.data.table import DetectionTable, Problem, write_table
from toolkit.errors import BadInput

STREAMED_BYTES = 64 * 2**20  # files from this size on
CHUNK = 4096  # images
CACHE_KIB = 32 * 1024  # of the database
KEYS = {
    "images": ("id", "file_name", "width", "height"),
    "annotations": ("id", "image_id", "category_id", "bbox", "area", "iscrowd", "attribute_ids"),
}
SMALL_LISTS = ("categories", "rel_categories", "attribute_categories")
SCHEMA = """
    PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; PRAGMA temp_store = FILE; PRAGMA locking_mode = EXCLUSIVE;
    CREATE TABLE images (n INTEGER PRIMARY KEY, id, name TEXT, entry BLOB);
    CREATE TABLE annotations (n INTEGER PRIMARY KEY, image, id, entry BLOB);
    CREATE TABLE relations (n INTEGER PRIMARY KEY, subject, object, entry BLOB);
    CREATE TABLE knot (n INTEGER PRIMARY KEY);
    CREATE TABLE elsewhere (name TEXT PRIMARY KEY) WITHOUT ROWID;
"""
# Annotations are sorted by the place of their image once (a merge sort on disk), so that a chunk's lie side by side.
INDICES = """
    CREATE INDEX image_id ON images (id);
    CREATE INDEX image_name ON images (name);
    CREATE TABLE placed AS SELECT i.n AS place, a.n AS n, a.entry AS entry
        FROM annotations a JOIN images i ON i.id = a.image
        ORDER BY i.n, a.n;
    CREATE INDEX place_of ON placed (place);
"""
RELATION_INDICES = """
    CREATE INDEX annotation_id ON annotations (id);
    CREATE INDEX subject_of ON relations (subject);
"""
KNOT = """
    INSERT OR IGNORE INTO knot SELECT n FROM images WHERE id IS NULL;
    INSERT OR IGNORE INTO knot SELECT n FROM images WHERE id IN (SELECT id FROM images GROUP BY id HAVING count(*) > 1);
    INSERT OR IGNORE INTO knot
        SELECT n FROM images WHERE name IN (SELECT name FROM images GROUP BY name HAVING count(*) > 1);
    INSERT OR IGNORE INTO knot SELECT i.n FROM annotations a JOIN images i ON i.id = a.image
        WHERE a.id IN (SELECT id FROM annotations GROUP BY id HAVING count(*) > 1);
"""
KNOT_OF_RELATIONS = """
    INSERT OR IGNORE INTO knot SELECT i.n FROM relations r
        LEFT JOIN annotations s ON s.id = r.subject LEFT JOIN annotations o ON o.id = r.object
        JOIN images i ON i.id = s.image OR i.id = o.image
        WHERE s.image IS NULL OR o.image IS NULL OR s.image != o.image;
"""


@dataclass
class _Head:
    """What a file has beside its long lists."""

    lists: dict[str, list] = field(default_factory=dict)
    tops: dict[str, object] = field(default_factory=dict)  # empty lists, and what is no list
    seen: set[str] = field(default_factory=set)
    folders: set[str] = field(default_factory=set)
    attribute_columns: int = 0
    images: int = 0
    relations: Counter = field(default_factory=Counter)  # by key


def read_streamed(
    annotation_file: Path,
    image_dir: Path | Places | None,
    check_images: bool | str,
    max_pixels: int,
    cache_file: Path,
    siblings: Sequence[Path] = (),
) -> DetectionTable:
    """As `toolkit.data.formats.coco` reads a file, with memory for `CHUNK` images. Raises BadInput."""
    cache_file.parent.mkdir(parents=True, exist_ok=True)
    with _database(cache_file.parent) as database:
        head = _spool(database, annotation_file)
        file = str(annotation_file)
        base = _classes(head, file)
        _check_kinds(database, file)
        _spool_names(database, siblings if check_images else ())
        names = [name for (name,) in database.execute("SELECT name FROM images WHERE name IS NOT NULL LIMIT 100")]
        root = image_dir or find_image_root(annotation_file, names)
        problems: list[Problem] = []
        checked = (
            {}
            if not check_images
            else {place: digest_of(place) for place in watched_of(root, sorted(head.folders))}
        )
        problems += base.problems
        formats = BoxFormats()
        validate = functools.partial(validate_document, file=file, max_image_pixels=max_pixels, formats=formats)
        rows = _rows(
            _judged(_chunks(database, head, validate, set(base.problems)), formats, file),
            head,
            problems,
            _file_check(database, head, root, check_images, max_pixels, problems),
        )
        return write_table(
            rows,
            cache_file=cache_file,
            categories=base.categories,
            predicates=base.predicates,
            attributes=base.attributes,
            attribute_columns=head.attribute_columns if base.attributes else 0,
            image_root=root.resolve(),
            problems=problems,
            name=file,
            checked=checked,
        )


def listed_names(annotation_file: Path) -> Iterator[str]:
    """File names of the images of a COCO file; what is no name, or no COCO file, is passed over."""
    try:
        for _, item in items_of(annotation_file, ("images",)):
            if isinstance(item, dict) and isinstance(item.get("file_name"), str):
                yield item["file_name"]
    except (BadInput, OSError):  # said where that split is read
        return


def _spool_names(database: sqlite3.Connection, siblings: Sequence[Path]) -> None:
    for sibling in siblings:
        names = ((os.path.normpath(name),) for name in listed_names(sibling))
        database.execute("BEGIN")
        database.executemany("INSERT OR IGNORE INTO elsewhere VALUES (?)", names)
        database.execute("COMMIT")


@contextlib.contextmanager
def _database(folder: Path) -> Iterator[sqlite3.Connection]:
    with tempfile.TemporaryDirectory(dir=folder, prefix="coco-") as place:
        connection = sqlite3.connect(Path(place) / "spool.db", isolation_level=None)
        try:
            connection.executescript(SCHEMA)
            connection.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
            yield connection
        except sqlite3.Error as error:
            raise BadInput(
                f"{folder}: the data could not be sorted there ({error}); free space or set "
                "DETECTION_TOOLKIT_CACHE to another folder"
            ) from error
        finally:
            connection.close()


def _spool(database: sqlite3.Connection, annotation_file: Path) -> _Head:
    """The file's items into the database, one at a time."""
    head = _Head()
    database.execute("BEGIN")
    for key, run in groupby(stream_lists(annotation_file), itemgetter(0)):
        items = _noted(head, run)
        if key in ROWS:
            table, row_of = ROWS[key]
            rows = (row_of(head, key, item) for item in items)
            database.executemany(f"INSERT INTO {table} VALUES (NULL, ?, ?, ?)", rows)
        elif key in SMALL_LISTS:
            head.lists.setdefault(key, []).extend(items)
        else:
            for _ in items:  # of no use; an empty list, or what is no list, is noted
                pass
    database.execute("COMMIT")
    database.executescript(INDICES + RELATION_INDICES * (head.relations.total() > 0))
    database.executescript(KNOT + KNOT_OF_RELATIONS * (head.relations.total() > 0))
    return head


def _noted(head: _Head, run: Iterator[tuple[str, object]]) -> Iterator[object]:
    """The items of one list; its key, or what it is instead of a list of items, goes into `head`."""
    for key, item in run:
        if isinstance(item, Whole):
            head.tops[key] = item.value
        else:
            head.seen.add(key)
            yield item


def _image(head: _Head, key: str, item: object) -> tuple:
    entry = _kept(key, item)
    head.images += 1
    name = entry.get("file_name") if isinstance(entry, dict) else None
    name = os.path.normpath(name) if isinstance(name, str) and name else None
    if name is not None:
        head.folders.add(os.path.dirname(name))
    return _key(entry, "id"), name, marshal.dumps(entry)


def _annotation(head: _Head, key: str, item: object) -> tuple:
    entry = _kept(key, item)
    ids = entry.get("attribute_ids") if isinstance(entry, dict) else None
    if isinstance(ids, list):
        head.attribute_columns = max(head.attribute_columns, len(ids), 1)
    return _key(entry, "image_id"), _key(entry, "id"), marshal.dumps(entry)


def _relation(head: _Head, key: str, item: object) -> tuple:
    head.relations[key] += 1
    if key == "relations" and isinstance(item, list) and len(item) == 3:
        ends = dict(zip(("subject_id", "object_id"), item, strict=False))
    else:
        ends = item
    return _key(ends, "subject_id"), _key(ends, "object_id"), marshal.dumps([key, head.relations[key] - 1, item])


ROWS = {"images": ("images", _image), "annotations": ("annotations", _annotation),
        "rel_annotations": ("relations", _relation), "relations": ("relations", _relation)}  # fmt: skip


def _kept(key: str, item: object) -> object:
    return {name: item[name] for name in KEYS[key] if name in item} if isinstance(item, dict) else item


def _key(entry: object, name: str) -> int | str | None:
    """An id as the database compares it; None: it is none."""
    value = entry.get(name) if isinstance(entry, dict) else None
    if type(value) is int:  # no truth value
        return value if -(2**63) <= value < 2**63 else f"i{value}"
    return f"s{value}" if isinstance(value, str) else None


def _check_kinds(database: sqlite3.Connection, file: str) -> None:
    kinds = [
        kind
        for (kind,) in database.execute(
            "SELECT DISTINCT typeof(id) || substr(id, 1, 1) = 'texts' FROM images WHERE id IS NOT NULL"
        )
    ]
    if len(set(kinds)) > 1:
        raise BadInput(f"{file}: some image ids are numbers and some are strings; expected one kind")


@dataclass
class _Chunk:
    """A validated document of some images; places: where each row stands in the file, from 1."""

    valid: Document
    places: list[int]
    knot: bool = False


def _classes(head: _Head, file: str) -> Document:
    """The file without its images: classes, and what is wrong with them. Raises BadInput where a list is missing."""
    document = {**head.tops, **head.lists}
    if "images" in head.seen:
        document["images"] = [{"id": 1, "file_name": "x", "width": 1, "height": 1}]
    if "annotations" in head.seen:
        document["annotations"] = []
    return validate_document({**document, "rel_annotations": [], "relations": []}, file)


def _chunks(
    database: sqlite3.Connection, head: _Head, validate: Callable[[dict], Document], known: set[Problem]
) -> Iterator[_Chunk]:
    """The knot, where there is one; then the other images in the order of the file.

    validate: checks a document; known: problems of the classes, which every document has.
    """
    orphans = (
        "SELECT n, entry FROM annotations WHERE image IS NULL OR image NOT IN "
        "(SELECT id FROM images WHERE id IS NOT NULL)"
    )
    lost = _lost_relations(database) if head.relations.total() else []
    if lost or database.execute(f"SELECT 1 FROM ({orphans}) LIMIT 1").fetchone():
        database.execute("INSERT OR IGNORE INTO knot VALUES (1)")  # a document must have an image
    if database.execute("SELECT 1 FROM knot LIMIT 1").fetchone():
        images = _entries(database, "SELECT n, entry FROM images WHERE n IN (SELECT n FROM knot) ORDER BY n")
        inside_knot = "SELECT id FROM images WHERE n IN (SELECT n FROM knot)"
        query = f"SELECT n, entry FROM annotations WHERE image IN ({inside_knot}) UNION {orphans} ORDER BY n"
        relations = [*_relations_of(database, inside_knot), *lost] if head.relations.total() else []
        yield _validated(head, validate, images, _entries(database, query), relations, known, knot=True)
    for first in range(1, head.images + 1, CHUNK):
        chunk = f"n BETWEEN {first} AND {first + CHUNK - 1} AND n NOT IN (SELECT n FROM knot)"
        images = _entries(database, f"SELECT n, entry FROM images WHERE {chunk} ORDER BY n")
        if images:
            ids = f"SELECT id FROM images WHERE {chunk}"
            # in the order of the file, as ids used twice in one image and relations are told by it
            place = chunk.removeprefix("n ").replace("AND n NOT", "AND place NOT")
            query = f"SELECT n, entry FROM placed WHERE place {place}"
            annotations = _entries(database, f"{query} ORDER BY n")
            relations = _relations_of(database, ids) if head.relations.total() else []
            yield _validated(head, validate, images, annotations, relations, known)


def _judged(chunks: Iterator[_Chunk], formats: BoxFormats, file: str) -> Iterator[_Chunk]:
    """The chunks; then BadInput where all of them together have boxes of another format, as one alone may seem to."""
    yield from chunks
    if wrong := formats.fault():
        raise BadInput(f"{file}: {wrong}")


def _entries(database: sqlite3.Connection, query: str) -> list[tuple[int, object]]:
    return [(n, marshal.loads(entry)) for n, entry in database.execute(query)]


def _relations_of(database: sqlite3.Connection, images: str) -> list:
    """(key, its number, entry) of the relations whose subject is in one of some images."""
    query = (
        f"SELECT r.n, r.entry FROM relations r JOIN annotations a ON a.id = r.subject WHERE a.image IN ({images}) "
        "GROUP BY r.n ORDER BY r.n"
    )
    return [tuple(marshal.loads(entry)) for _, entry in database.execute(query)]


def _lost_relations(database: sqlite3.Connection) -> list:
    """Those whose subject is no annotation, or one of no image."""
    query = (
        "SELECT r.n, r.entry FROM relations r LEFT JOIN annotations a ON a.id = r.subject LEFT JOIN images i "
        "ON i.id = a.image WHERE i.id IS NULL ORDER BY r.n"
    )
    return [tuple(marshal.loads(entry)) for _, entry in database.execute(query)]


def _validated(
    head: _Head,
    validate: Callable[[dict], Document],
    images: list,
    annotations: list,
    relations: list,
    known: set[Problem],
    knot: bool = False,
) -> _Chunk:
    document = {**head.lists, "images": [entry for _, entry in images]}
    document["annotations"] = [entry for _, entry in annotations]
    for key in ("rel_annotations", "relations"):
        document[key] = [item for of, _, item in sorted(relations, key=lambda each: each[1]) if of == key]
    valid = validate({"categories": [], **document})
    places = {
        entry["id"]: n for n, entry in images if isinstance(entry, dict) and isinstance(entry.get("id"), int | str)
    }
    numbers = {"image": [n - 1 for n, _ in images], "annotation": [n - 1 for n, _ in annotations]}
    numbers["relation"] = sorted(n + (of == "relations") * head.relations["rel_annotations"] for of, n, _ in relations)
    valid.problems = [_numbered(problem, numbers) for problem in valid.problems if problem not in known]
    return _Chunk(valid, [places[row["image_id"]] for row in valid.rows], knot)


def _numbered(problem: Problem, numbers: Mapping[str, list[int]]) -> Problem:
    """The problem with the number that an entry without an id has in the file, instead of that in its chunk."""
    found = re.match(r"(image|annotation|relation) entry (\d+)", problem.message)
    if not found:
        return problem
    number = f"{found[1]} entry {numbers[found[1]][int(found[2])]}"
    return dataclasses.replace(problem, message=number + problem.message[found.end() :])


def _rows(
    chunks: Iterator[_Chunk], head: _Head, problems: list[Problem], check: Callable[[list[dict] | None], set]
) -> Iterator[dict]:
    """The rows in the order of the file: those of the knot are kept until their place comes."""
    kept: list[tuple[int, dict]] = []
    for chunk in chunks:
        problems += chunk.valid.problems
        bad = check(chunk.valid.rows)
        rows = [
            (n, _padded(row, head, chunk.valid))
            for n, row in zip(chunk.places, chunk.valid.rows, strict=True)
            if row["image_id"] not in bad
        ]
        if chunk.knot:
            kept = rows
            continue
        last = chunk.places[-1] if chunk.places else 0
        rows = sorted([*rows, *(pair for pair in kept if pair[0] < last)], key=lambda pair: pair[0])
        kept = [pair for pair in kept if pair[0] >= last]
        yield from (row for _, row in rows)
    yield from (row for _, row in kept)
    check(None)


def _padded(row: dict, head: _Head, valid: Document) -> dict:
    if valid.attributes:
        of_image = row["objects"]["attributes"]
        of_image[:] = [(ids + [0] * head.attribute_columns)[: head.attribute_columns] for ids in of_image]
    return row


def _file_check(
    database: sqlite3.Connection, head: _Head, root: Path | Places, check_images: bool | str, max_pixels: int,
    problems: list[Problem],
) -> Callable[[list[dict] | None], set]:
    """What checks the image files of some rows and gives the ids of the bad ones; called with None after the last."""
    if not check_images:
        return lambda rows: set()
    full, notes = depth(check_images, head.images, root)
    problems += notes
    check = image_checker(root, full, max_pixels)
    seen = {"rows": 0, "there": 0, "first": ""}

    def run(rows: list[dict] | None) -> set:
        if rows is None:
            if seen["rows"] and not seen["there"]:
                raise BadInput(
                    f"{root}: none of the {seen['rows']} listed images is in this folder; the first is "
                    f"{seen['first']!r}; set the image folder (--data.image_dir)"
                )
            problems.extend(_unlisted(database, root, head.folders))
            return set()
        found = parallel(check, rows, "checking images", waits_for(root))
        problems.extend(found)
        seen["rows"] += len(rows)
        seen["there"] += len(rows) - sum("not found" in problem.message for problem in found)
        seen["first"] = seen["first"] or (rows[0]["file_name"] if rows else "")
        return {problem.image_id for problem in found if problem.severity == "error"}

    return run


def _unlisted(database: sqlite3.Connection, root: Path | Places, folders: set[str]) -> list[Problem]:
    """Image files beside listed ones that no record names."""
    query = "SELECT 1 FROM images WHERE name = ?1 UNION SELECT 1 FROM elsewhere WHERE name = ?1"
    inner = sorted(folder for folder in folders if ".." not in folder)
    names = [name for name in image_names(root, inner) if not database.execute(query, (name,)).fetchone()]
    return unlisted_problems(root, sorted(names))
