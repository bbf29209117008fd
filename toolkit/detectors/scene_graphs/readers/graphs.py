"""Relation data in other layouts than COCO's, which are read into columns once, checked, and cached as a table."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from toolkit.base.errors import BadInput
from toolkit.base.files import near_names
from toolkit.data.annotations import Annotations, Reading
from toolkit.data.check_files import with_good_files
from toolkit.data.checks import CheckedAnnotations, check
from toolkit.data.image_sources import ImageSources, open_sources
from toolkit.data.table import DetectionTable
from toolkit.data.table_cache import cached_table, file_digest, write_table


def read_graphs(
    files: Sequence[Path],
    read: Callable[[Path | ImageSources], Annotations | CheckedAnnotations],
    reading: Reading,
    what: str,
    *,
    key: Sequence[object] = (),
) -> DetectionTable:
    """Return the table of images with relations, from the cache if files, images and options are unchanged.

    Args:
        files: the files that hold the data; their content is part of the cache key.
        read: function that reads these files, given the place of the images. If its result is not yet checked, it is
            checked here.
        what: format, split and options as a text, for the name of the table.
        key: format, split and options for the cache key; by default `what`.

    Raises:
        BadInput: a file is missing or is not JSON, or `read_coco` would raise it for such data.
    """
    missing = [f"{file}: no such annotation file{near_names(file)}" for file in files if not file.is_file()]
    if missing:
        raise BadInput(missing)
    check_images = reading.check_images
    max_image_pixels = reading.max_image_pixels
    sources = open_sources(reading.image_dir, must_exist=bool(check_images))
    name = f"{files[0]} {what}"

    def make(cache_file: Path) -> DetectionTable:
        annotations = read(sources)
        is_checked = isinstance(annotations, CheckedAnnotations)
        checked = annotations
        if not is_checked:
            checked = check(annotations, str(files[0]), max_image_pixels, reading.crowds)
        good, digests = with_good_files(checked, sources, check_images, max_image_pixels, white=reading.white)
        return write_table(
            **good.columns(),
            cache_file=cache_file,
            image_root=sources.resolve(),
            name=name,
            checked=digests,
        )

    parts = [
        *(key or [what]),
        check_images,
        sources.resolve(),
        *map(file_digest, files),
    ]
    return cached_table(parts, make, reading, name=name)


@contextmanager
def noting_faults(problems: list[str], where: str, expected: str) -> Iterator[None]:
    """Return a context that catches the errors of reading an unexpected entry, and appends a sentence on it to
    `problems`.

    where: file and entry, for the sentence. expected: description of an entry as it should be.
    """
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        shown = repr(error)
        problems.append(f"{where}: expected {expected} ({shown[:100]}{'…' * (len(shown) > 100)})")


def empty_graphs(classes: Sequence[str], predicates: Sequence[str]) -> Annotations:
    """Return annotations without images, with these classes and predicates, whose ids count from 0."""
    annotations = Annotations([{"id": number, "name": name} for number, name in enumerate(classes)])
    annotations.predicates = [{"id": number, "name": name} for number, name in enumerate(predicates)]
    return annotations


def add_graph(to: Annotations, image: dict, boxes: Sequence[tuple], relations: Sequence[Sequence]) -> None:
    """Add one image with its boxes and relations to the annotations `to`, in place; ids of annotations count from 1.

    Args:
        image: `id`, `file_name`, `width`, `height`.
        boxes: (class from 0, [x, y, width, height]) for each.
        relations: (subject, object, predicate from 0) for each; subject and object are positions in `boxes`.

    Invalid entries are added too, because the later check of the annotations reports them.
    """
    first = len(to) + 1
    count = len(boxes)
    to.add_image(image)
    for number, (label, xywh) in enumerate(boxes):
        to.add(
            {
                "id": first + number,
                "image_id": image["id"],
                "category_id": label,
                "bbox": xywh,
            }
        )

    def id_of(position: object) -> object:
        if isinstance(position, int) and 0 <= position < count:
            return first + position
        return f"at position {position} of {count}"  # an unknown id, which the check then quotes

    for *positions, predicate in relations:
        ends = [id_of(position) for position in positions]
        to.relations.add(
            {
                "image_id": image["id"],
                "subject_id": ends[0],
                "object_id": ends[1],
                "predicate_id": predicate,
            }
        )
