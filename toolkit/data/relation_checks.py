"""The rules of relations, and the check that applies them: columns of a file become `Relations`."""

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence

import numpy as np

from toolkit.base.boxes import Boxes, Relations
from toolkit.data.annotations import ENTRY, NO_ID, TRIPLET_KEYS, Codes, RelationColumns, fits_int64
from toolkit.data.rules import Rule, apply_rules, by_image, noted
from toolkit.data.table import Problem

# In place of the row of a box:
DROPPED = -1
UNKNOWN = -2  # no annotation has this id


class AnnotationIndex:
    """Index of annotations by id after the check; only relations need this.

    id, image, row: columns of the kept annotations, by ascending id: the id, the index of the image, and the row of the
    box among those of its image. dropped: the id of the image by id of each dropped annotation.
    image_ids: codes of images: of those of the boxes their index, then those of images that do not exist.
    """

    def __init__(self, images: list[int | str], boxes: Boxes, dropped: dict[int, object]):
        self.images = images
        self.boxes = boxes
        self.dropped = dropped

    @functools.cached_property
    def image_ids(self) -> Codes:
        """The codes of the ids of images, see the class."""
        codes = Codes()
        for image_id in self.images:
            codes(image_id)
        return codes

    def code(self, image_id: object) -> int:
        """Return the code of the image with this id, which may be a value of any type."""
        return self.image_ids(image_id if isinstance(image_id, Hashable) else repr(image_id))

    @functools.cached_property
    def _order(self) -> np.ndarray:
        return np.argsort(self.boxes.ids, kind="stable")

    @functools.cached_property
    def id(self) -> np.ndarray:
        """The ids of the K kept annotations, (K,), ascending."""
        return self.boxes.ids[self._order]

    @functools.cached_property
    def image(self) -> np.ndarray:
        """The position of the image of each annotation in `id`, (K,)."""
        return self.boxes.image_index[self._order]

    @functools.cached_property
    def row(self) -> np.ndarray:
        """The position of each annotation in `id` among the boxes of its image, (K,)."""
        return self._order - self.boxes.offsets[self.image]

    def rows_of(self, ids: np.ndarray) -> np.ndarray:
        """Return the position of each of N ids in the column `id`, (N,); -1 for an id that is not there."""
        if not len(self.id):
            return np.full(len(ids), -1)
        at = np.searchsorted(self.id, ids)
        at = at.clip(max=len(self.id) - 1)
        return np.where(self.id[at] == ids, at, -1)

    def of(self, id_: object) -> tuple[int, int]:
        """Return (code of the image, row among the boxes of the image) of an annotation.

        The row is DROPPED if the annotation was dropped, and UNKNOWN if no annotation has this id.
        """
        if not isinstance(id_, int):
            return UNKNOWN, UNKNOWN
        if id_ in self.dropped:
            return self.code(self.dropped[id_]), DROPPED
        at = self.rows_of(np.array([id_]))[0] if fits_int64(id_) else -1
        if at < 0:
            return UNKNOWN, UNKNOWN
        return int(self.image[at]), int(self.row[at])

    def places(self, ids: Sequence[int], given: Callable[[int], object]) -> tuple[np.ndarray, np.ndarray]:
        """Return (R,) codes of the images and rows of R annotations, as `of` does for one.

        ids: R numbers, NO_ID for ids that are not such a number. given: function that returns an id as in the file.
        """
        ids = np.array(ids, np.int64)
        at = np.where(ids == NO_ID, -1, self.rows_of(ids))
        image = np.append(self.image, UNKNOWN)[at]
        row = np.append(self.row, UNKNOWN)[at]
        for number in np.flatnonzero(at < 0).tolist():
            image[number], row[number] = self.of(given(number))
        return image, row


class RelationFacts:
    """The columns of R relations, as rules of relations look at them.

    image, row: (2, R) code of the image, and row, of subject and object, as of `AnnotationIndex.of`
    label: (R,) of the predicate; -1 if it is not defined
    stated: (R,) code of the image that the entry names; UNKNOWN if it names none
    faults: as of `RelationColumns`. usable: (R,) bool, see `apply_rules`.
    """

    def __init__(self, relations: RelationColumns, file: str, index: AnnotationIndex, predicates: Mapping):
        self.relations = relations
        self.file = file
        self.index = index
        self.faults = relations.faults
        self.label = relations.predicate_ids.find(predicates)[np.array(relations.predicate, np.int32)]
        codes = [index.code(image_id) for image_id in relations.image_ids.values]
        self.stated = np.array([*codes, UNKNOWN])[np.array(relations.image, np.int32)]  # -1, none, is the last
        for number in relations.odd:
            if "image_id" in self.given(number):
                self.stated[number] = index.code(self.given(number)["image_id"])
        of_subject = index.places(relations.subject, lambda number: self.given(number).get("subject_id"))
        of_object = index.places(relations.object, lambda number: self.given(number).get("object_id"))
        self.image, self.row = np.stack([of_subject, of_object], axis=1)
        self.usable = np.ones(len(relations), bool)

    def __len__(self) -> int:
        return len(self.label)

    def given(self, number: int) -> Mapping:
        """Return a relation as the file has it; {} if the entry is not a mapping."""
        entry = self.relations.entry(number)
        return entry if isinstance(entry, dict) else {}

    def image_id(self, number: int, end: int = 0) -> int | str:
        """Return the id of the image of the subject, or for `end` 1 of the object."""
        return self.index.image_ids.values[self.image[end, number]]

    def is_repeated(self) -> np.ndarray:
        """Return (R,) bool, whether an earlier relation that can be used has the same subject, object and predicate."""
        first_row = self.index.boxes.offsets[self.image[0, self.usable]]
        subject, object_ = first_row + self.row[:, self.usable]  # rows among the boxes of all images
        repeated = np.zeros(len(self), bool)
        repeated[self.usable] = stands_before(np.stack([subject, object_, self.label[self.usable]]))
        return repeated

    def problem(self, number: int, severity: str, sentence: str) -> Problem:
        """Return the problem of a relation, with the id of its image if that is known."""
        if severity == "warning":
            return Problem(severity, self.file, self.image_id(number), None, sentence)
        given = self.given(number)
        name = f"relation {given.get('id', f'entry {number}')}"
        return Problem(severity, self.file, given.get("image_id"), None, f"{name}: {sentence}")


def stands_before(columns: np.ndarray) -> np.ndarray:
    """Return (R,) bool, whether each of R columns (K, R) equals an earlier one.

    Of the columns a, b, a, a it is True for the last two.
    """
    _, first = np.unique(columns, axis=1, return_index=True)
    is_repeated = np.ones(columns.shape[1], bool)
    is_repeated[first] = False
    return is_repeated


def _unknown(key: str, fault: str) -> Callable[[RelationFacts, int], list[str]]:
    """Return a function that says that the id of a key is missing, or what is wrong with it.

    fault: a format, such as "annotation {!r} does not exist".
    """

    def sentences(c: RelationFacts, number: int) -> list[str]:
        given = c.given(number)
        return [fault.format(given[key]) if key in given else f"`{key}` missing"]

    return sentences


def _two_images(c: RelationFacts, number: int) -> list[str]:
    return [f"subject is in image {c.image_id(number)}, object in image {c.image_id(number, 1)}"]


def _other_image(c: RelationFacts, number: int) -> list[str]:
    stated = c.given(number)["image_id"]
    return [f"`image_id` is {stated!r}, subject and object are in image {c.image_id(number)}"]


def _listed_again(c: RelationFacts, number: int) -> list[str]:
    triplet = [c.given(number)[key] for key in TRIPLET_KEYS]
    return [f"relation {triplet} (subject, object, predicate) is listed again; kept"]


NOT_THERE = "annotation {!r} does not exist"
# All rules of relations, in the order in which they are reported. Those that ask for `usable` are about relations whose
# subject, object and predicate exist.
RELATION_RULES = (
    noted(ENTRY),
    Rule("subject_id", lambda c: c.row[0] == UNKNOWN, _unknown("subject_id", NOT_THERE)),
    Rule("object_id", lambda c: c.row[1] == UNKNOWN, _unknown("object_id", NOT_THERE)),
    Rule("predicate_id", lambda c: c.label < 0, _unknown("predicate_id", "predicate {!r} is not defined")),
    Rule("image", lambda c: c.usable & (c.image[0] != c.image[1]), _two_images),
    Rule("image", lambda c: c.usable & (c.stated != UNKNOWN) & (c.stated != c.image[0]), _other_image),
    Rule(
        "ends",
        lambda c: c.usable & (c.row[0] == c.row[1]) & (c.row[0] != DROPPED),
        lambda c, number: ["subject and object are one annotation"],
    ),
    Rule("ends", lambda c: c.usable & (c.row == DROPPED).any(axis=0), lambda c, number: []),  # follows from its box
    Rule("triplet", lambda c: c.is_repeated(), _listed_again, "warning"),
)


def check_relations(
    relations: RelationColumns,
    file: str,
    index: AnnotationIndex,
    predicates: Mapping,
    problems: list[Problem],
) -> Relations:
    """Return the relations between kept boxes.

    A relation whose subject or object was dropped is dropped without a further problem.

    predicates: label of each predicate id. problems: list to which the problems found are added.
    """
    num_images = len(index.images)
    if not len(relations):
        return Relations.none(num_images)
    facts = RelationFacts(relations, file, index, predicates)
    problems += apply_rules(RELATION_RULES, facts)
    order, offsets = by_image(facts.image[0], facts.usable, num_images)
    subject, object_ = facts.row
    return Relations(offsets, subject[order], object_[order], facts.label[order])
