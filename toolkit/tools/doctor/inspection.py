"""Inspects a data set for leakage between splits, duplicates, classes and sizes, and writes a cleaned copy."""

import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np

from toolkit.base.boxes import Boxes, common_and_union
from toolkit.data.check_files import UNLISTED, unlisted_files
from toolkit.data.columns import Columns
from toolkit.data.mask_checks import mended_areas
from toolkit.data.problem_lines import kind_of
from toolkit.data.splits import CROWDS_ARE_SKIPPED, many_crowds, mostly_empty, overlap
from toolkit.data.table import DetectionTable
from toolkit.tools.doctor.near_duplicates import ImageSignatures, alike_pairs, groups, same_files, signatures_of
from toolkit.tools.doctor.tile_advice import inputs_hw, tile_advice, words_of
from toolkit.tools.writers import names_by_content, write_coco_folder

NEAR_BOX_IOU = 0.9
SMALL_PX = 4  # the shorter side of a small box, at the input size
RARE_SHARE = 0.01  # share of all boxes


@dataclass
class Finding:
    """A finding about a data set.

    Attributes:
        severity: "error", "warning" or "note".
        kind: a short name, such as "small boxes".
        message: a sentence.
        items: every place that the finding is about, as JSON values.
        kinds: of a finding "record", the kind of each item: its sentence without names and numbers.
    """

    severity: str
    kind: str
    message: str
    items: list = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)


@dataclass
class SplitSummary:
    """A summary of the contents of a split.

    Attributes:
        images, boxes, crowds: their numbers; boxes are without crowds.
        background: number of images without a box; images with only crowd regions are among them.
        largest_count: largest number of boxes in an image.
        classes: {name of the class: {"boxes": number, "images": number}}.
        sizes_px: the 5, 25, 50, 75 and 95 % quantiles of the square root of a box's area, in pixels of the images that
            the network gets; empty without boxes.
    """

    images: int
    background: int
    boxes: int
    crowds: int
    largest_count: int
    classes: dict[str, dict[str, int]]
    sizes_px: list[float]


@dataclass
class Inspection:
    """The result of the inspection of a data set.

    Attributes:
        findings: all findings.
        splits: a summary of each split by its name.
        drop_images: {(split, row of the image): reason} of the images that `clean_copy` leaves out.
        drop_boxes: {(split, row of the image): {position of the box in the image: reason}}, likewise.
    """

    findings: list[Finding] = field(default_factory=list)
    splits: dict[str, SplitSummary] = field(default_factory=dict)
    drop_images: dict[tuple[str, int], str] = field(default_factory=dict)
    drop_boxes: dict[tuple[str, int], dict[int, str]] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """The exit code of the inspection: 0 without warnings and errors, 1 with warnings, 2 with errors."""
        worst = {finding.severity for finding in self.findings}
        return 2 if "error" in worst else 1 if "warning" in worst else 0

    def to_json(self) -> str:
        """Return the findings and summaries as JSON, for programs."""
        all_ = asdict(self)
        content = {
            "exit_code": self.exit_code,
            "findings": all_["findings"],
            "splits": all_["splits"],
        }
        return json.dumps(content, indent=2)


def inspect_tables(
    tables: Mapping[str, DetectionTable],
    size: Mapping[str, int],
    cache_dir: str | Path | None = None,
    compare: bool = True,
) -> Inspection:
    """Inspect all splits of a data set together.

    Args:
        tables: the data tables by the name of the split. They must be read with on_error "drop", so that they hold the
            problems of their records.
        size: what images are resized to for the network, as `toolkit.data.pipeline.processor_size`.
        cache_dir: root of the cache for the comparison of images; None: the default.
        compare: decode all images to find images that are the same or look alike.
    """
    result = Inspection()
    for split, table in tables.items():
        result.splits[split] = _walk(split, table, size, result)
    result.findings += [
        *_problems(tables),
        *_class_findings(tables, result.splits),
        *_of_splits(tables),
    ]
    if compare:
        _compare(tables, cache_dir, result)
    else:
        message = "images are not compared with each other, which decodes each of them; --check-images full does"
        result.findings.append(Finding("note", "not compared", message))
    for split, summary in result.splits.items():
        result.findings += _advice(split, summary)
    return result


def _of_splits(tables: Mapping[str, DetectionTable]) -> Iterator[Finding]:
    """Yield findings about whole splits: almost no objects, or the same images as another split."""
    for split, table in tables.items():
        fault = mostly_empty(table)
        crowds = many_crowds(table)
        if fault and CROWDS_ARE_SKIPPED in fault:
            yield Finding("error", "crowds", f"{split}: {fault}")
        elif fault:
            yield Finding("error", "background", f"{split}: {fault}; were the labels found?")
        elif crowds:
            yield Finding("warning", "crowds", f"{split}: {crowds}")
    for first, second in itertools.combinations(tables, 2):
        text = overlap(tables[first], tables[second], (first, second))
        if text:
            message = f"{text}: metrics on these images say nothing about other images"
            yield Finding("warning", "same split", message)


def _walk(split: str, table: DetectionTable, size: Mapping[str, int], result: Inspection) -> SplitSummary:
    """Count the images and boxes of a split, summarise their sizes, and report small boxes and boxes given twice."""
    truth = table.boxes()
    names = table.file_names()
    plain = truth[~truth.iscrowd]
    classes = len(table.categories)
    twice = list(_given_twice(split, table, truth, names, result))
    if twice:
        message = f"{split}: {len(twice)} boxes of one class that overlap by an IoU above {NEAR_BOX_IOU}"
        result.findings.append(Finding("warning", "box given twice", message, twice))
    sizes_hw = table.sizes_hw()
    sizes_wh = sizes_hw[plain.image_index, ::-1].astype(np.float32)
    inputs_wh = inputs_hw(sizes_hw, size)[plain.image_index, ::-1].astype(np.float32)
    sides = (plain.xyxy[:, 2:] - plain.xyxy[:, :2]).astype(np.float32) * inputs_wh / sizes_wh
    is_small = sides.min(axis=1, initial=np.inf) < SMALL_PX
    num_small = int(is_small.sum())
    if num_small:
        few = np.bincount(plain.image_index[is_small])
        small = [{"split": split, "image": names[i], "boxes": int(few[i])} for i in np.flatnonzero(few)]
        message = f"{split}: {num_small} of {len(plain)} boxes are less than {SMALL_PX} px wide or high at an input "
        result.findings.append(Finding("note", "small boxes", f"{message}size of {words_of(size)}", small))
    advice = tile_advice(split, table, size)
    if advice:
        result.findings.append(Finding("note", "tiles", advice, [split]))
    sizes = np.sqrt(sides.prod(axis=1))
    quantiles = np.quantile(sizes, (0.05, 0.25, 0.5, 0.75, 0.95)).round(1).tolist() if len(sizes) else []
    boxes = np.bincount(plain.labels, minlength=classes)
    images = np.bincount(
        np.unique(plain.image_index * classes + plain.labels) % classes,
        minlength=classes,
    )
    counts = zip(table.class_names, boxes.tolist(), images.tolist(), strict=True)
    return SplitSummary(
        images=len(table),
        background=int((np.diff(plain.offsets) == 0).sum()),
        boxes=len(plain),
        crowds=int(truth.iscrowd.sum()),
        largest_count=int(np.diff(plain.offsets).max(initial=0)),
        classes={name: {"boxes": of_boxes, "images": of_images} for name, of_boxes, of_images in counts},
        sizes_px=quantiles,
    )


def _given_twice(
    split: str,
    table: DetectionTable,
    truth: Boxes,
    names: Sequence[str],
    result: Inspection,
) -> Iterator[dict]:
    """Yield a finding for each duplicated box, whose second copy is marked to be dropped."""
    for index, name in enumerate(names):
        part = truth.of_image(index)
        labels = truth.labels[part]
        ids = truth.ids[part].tolist()
        for first, second in near_boxes(truth.xyxy[part].astype(np.float32), labels, ~truth.iscrowd[part]):
            category = table.class_names[labels[first]]
            both = [ids[first], ids[second]]
            again = f"{category} again: annotation {both[0]}"
            result.drop_boxes.setdefault((split, index), {})[second] = again
            yield {"split": split, "image": name, "class": category, "annotations": both}


def near_boxes(boxes: np.ndarray, labels: np.ndarray, plain: np.ndarray) -> list[tuple[int, int]]:
    """Return pairs (first, second) of boxes of one class whose IoU is above `NEAR_BOX_IOU`, as indices.

    A box is the second in at most one pair; the second of a pair is in no other pair as the first.

    Args:
        boxes, labels: (N, 4) xyxy and (N,), of one image.
        plain: (N,) bool, False for crowd regions, which are left out.
    """
    if len(boxes) < 2:
        return []
    common, union = common_and_union(boxes[:, None], boxes[None])
    near = common > NEAR_BOX_IOU * union
    near &= (labels[:, None] == labels[None]) & plain[:, None] & plain[None]
    pairs = []
    gone = set()
    for i, j in zip(*np.nonzero(np.triu(near, 1)), strict=True):
        if i not in gone and j not in gone:
            pairs.append((int(i), int(j)))
            gone.add(j)
    return pairs


def _problems(tables: Mapping[str, DetectionTable]) -> Iterator[Finding]:
    """Yield the problems of the single records. A file is unlisted when no split of its folder lists it."""
    roots = Counter(table.image_root for table in tables.values() if table.image_root is not None)
    shared = {root: set() for root, splits in roots.items() if splits > 1}  # file names listed by a split of the root
    for table in tables.values():
        if table.image_root in shared:
            shared[table.image_root].update(table.file_names())
            shared[table.image_root].update(problem.file for problem in table.problems)
    grouped = {}
    for split, table in tables.items():
        problems = [p for p in table.problems if not (table.image_root in shared and UNLISTED in p.message)]
        for severity in ("error", "warning", "note"):
            grouped[split, severity] = [problem for problem in problems if problem.severity == severity]
    for root, listed in shared.items():
        folders = sorted({str(Path(name).parent) for name in listed if ".." not in name})
        grouped[root, "warning"] = unlisted_files(root, folders, listed)
    for (where, severity), problems in grouped.items():
        if problems:
            items = [str(problem).split(": ", 1)[1] for problem in problems]
            kinds = [kind_of(problem.message) for problem in problems]
            yield Finding(severity, "record", f"{where}: {len(items)}", items, kinds)


def _class_findings(tables: Mapping[str, DetectionTable], splits: Mapping[str, SplitSummary]) -> Iterator[Finding]:
    names = {split: table.class_names for split, table in tables.items()}
    if len({tuple(class_names) for class_names in names.values()}) > 1:
        yield Finding("error", "classes", "the splits do not have the same classes in the same order", [names])
        return
    totals = Counter()
    for summary in splits.values():
        totals.update({name: counts["boxes"] for name, counts in summary.classes.items()})
    unused = [name for name, count in totals.items() if not count]
    if unused:
        message = f"{len(unused)} classes have no box at all: {', '.join(unused[:10])}"
        yield Finding("warning", "unused classes", message, unused)
    for split, summary in splits.items():
        missing = [name for name, counts in summary.classes.items() if not counts["boxes"] and totals[name]]
        if missing:
            yield Finding("warning", "missing classes", f"{split}: no box of {', '.join(missing[:10])}", missing)


def _compare(tables: Mapping[str, DetectionTable], cache_dir: str | Path | None, result: Inspection) -> None:
    """Find images that are the same or look alike, between splits (leakage) and within one."""

    def name_of(position: tuple[str, int]) -> str:
        split, index = position
        return f"{split}/{tables[split].file_name(index)}"

    signatures = [signatures_of(table, cache_dir) for table in tables.values()]
    columns = ([getattr(signature, name) for signature in signatures] for name in ("digests", "thumbnails"))
    joined = ImageSignatures(*map(np.concatenate, columns))
    position = [(split, index) for split, table in tables.items() for index in range(len(table))]
    same = {pair for group in same_files(joined) for pair in _copies(group, [position[i][0] for i in group])}
    splits = np.repeat(np.arange(len(signatures)), [len(signature) for signature in signatures])
    alike = {(i, j) for i, j in alike_pairs(joined, splits) if joined.digests[i] != joined.digests[j]}
    pairs_by_kind: dict[str, list[tuple[int, int]]] = {}
    for i, j in sorted(same | alike):
        first = position[i]
        second = position[j]
        kind = ("same file" if (i, j) in same else "look alike") + (" in two splits" if first[0] != second[0] else "")
        pairs_by_kind.setdefault(kind, []).append((i, j))
        if kind != "look alike":  # images of one split that look alike may be intended
            # keep the image that is evaluated on
            keep, drop = (second, first) if first[0] == "train" and second[0] != "train" else (first, second)
            if keep not in result.drop_images:
                result.drop_images.setdefault(drop, f"{kind}: {name_of(first)}/{name_of(second)}")
    for kind, pairs in pairs_by_kind.items():
        severity = "note" if kind == "look alike" else "warning"
        items = [[name_of(position[i]) for i in group] for group in _groups(len(position), pairs)]
        images = sum(map(len, items))
        message = f"{kind}: {images} images in {len(items)} group{'s' * (len(items) > 1)}"
        result.findings.append(Finding(severity, kind, message, items))


def _groups(count: int, pairs: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Return the groups of at least two of `count` images that `pairs` connect."""
    members: dict[int, list[int]] = {}
    group_of = groups(count, pairs)
    for image in sorted({image for pair in pairs for image in pair}):
        members.setdefault(int(group_of[image]), []).append(image)
    return list(members.values())


def _copies(group: Sequence[int], splits: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Yield pairs of a group of images with the same bytes: each image with the first of its split, and the first
    images of any two splits."""
    firsts: dict[str, int] = {}
    for index, split in zip(group, splits, strict=True):
        if split in firsts:
            yield firsts[split], index
        firsts.setdefault(split, index)
    yield from itertools.combinations(firsts.values(), 2)


def _advice(split: str, summary: SplitSummary) -> Iterator[Finding]:
    counts = {name: entry["boxes"] for name, entry in summary.classes.items() if entry["boxes"]}
    rare = [name for name, count in counts.items() if count < RARE_SHARE * summary.boxes]
    if rare:
        message = f"{split}: {', '.join(rare[:10])} have less than {RARE_SHARE:.0%} of the boxes; "
        message += "--data.repeat_factor 0.01 shows images with rare classes more often"
        yield Finding("note", "balance", message, rare)


def query_notes(splits: Mapping[str, SplitSummary]) -> Iterator[Finding]:
    """Yield a note for each split on the number of queries that a DETR needs."""
    for split, summary in splits.items():
        most = summary.largest_count
        if most:
            message = f"{split}: at most {most} objects in an image, so that a DETR needs at least {most} queries; "
            yield Finding("note", "queries", message + "twice as many leave room")


def clean_copy(tables: Mapping[str, DetectionTable], inspection: Inspection, out: Path) -> list[str]:
    """Write the splits as a COCO data set to the folder `out`, without the faults that the inspection found, and return
    a log with one line for each change.

    It leaves out unusable records, images without any usable record, images that are in another split or twice in one,
    boxes given twice, and classes without a box. Repairs made on reading, such as clipped boxes, are kept. An area that
    differs from that of the mask by more than 5 % becomes that of the mask. Image files get the suffix of their format.
    The log is also written to `changes.txt` in the folder.
    """
    log = []
    unused = next(
        (set(finding.items) for finding in inspection.findings if finding.kind == "unused classes"),
        set(),
    )
    unused -= {table.class_names[label] for table in tables.values() for label in np.unique(table.boxes().labels)}
    log += [f"class {name}: left out, it has no box" for name in sorted(unused)]
    for split, table in tables.items():
        log += [f"{split}: {problem}" for problem in table.problems if problem.severity != "note"]
        name = "train" if split == "all" else split
        cleaned = _cleaned(split, table, inspection, unused, log)
        write_coco_folder(cleaned, out, name, names=names_by_content(cleaned))
    (out / "changes.txt").write_text("".join(f"{line}\n" for line in log), encoding="utf-8")
    return log


def _cleaned(split: str, table: DetectionTable, inspection: Inspection, unused: Set, log: list[str]) -> DetectionTable:
    whole = table.labelled()
    boxes = whole.boxes
    images = np.ones(len(table), bool)
    kept = np.ones(len(boxes), bool)
    without_usable = {p.image_id for p in table.problems if "annotations is usable" in p.message}
    for index, image in enumerate(whole.images):
        reason = inspection.drop_images.get((split, index))
        if image.image_id in without_usable:
            reason = "none of its annotations is usable"
        if reason:
            log.append(f"{split}: image {image.file_name} left out: {reason}")
            images[index] = False
            continue
        for position, why in inspection.drop_boxes.get((split, index), {}).items():
            row = boxes.offsets[index] + position
            log.append(f"{split}: image {image.file_name}, annotation {boxes.ids[row]} left out: {why}")
            kept[row] = False
    area = boxes.area.copy()
    if table.has_masks:
        for row, of_mask in mended_areas(boxes, whole.images).items():
            name = whole.images[boxes.image_index[row]].file_name
            log.append(f"{split}: image {name}, annotation {boxes.ids[row]}: area {area[row]:g} became {of_mask:g}")
            area[row] = of_mask
    labels = [label for label, category in enumerate(whole.categories) if category.name not in unused]
    stored = table.columns
    mended = replace(
        stored.boxes, labels=np.searchsorted(labels, stored.boxes.labels), area=area.astype(stored.boxes.area.dtype)
    )
    relations = stored.relations.of_boxes(stored.boxes, kept)
    return replace(
        table,
        columns=Columns(stored.images, mended[kept], relations).select(images),
        categories=tuple(whole.categories[label] for label in labels),
        problems=[],
        fingerprint=f"{table.fingerprint}-clean",
        before_classes=None,
        arrow_files=(),
    )
