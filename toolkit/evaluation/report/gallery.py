"""The pictures of a report: best and worst images, confident errors, probable annotation errors."""

from dataclasses import replace

import numpy as np

from toolkit.evaluation.draw import Mark
from toolkit.evaluation.report.annotations import KINDS as SUSPICIONS
from toolkit.evaluation.report.annotations import Suspect
from toolkit.evaluation.report.errors import KINDS, MEANING
from toolkit.evaluation.report.judgement import Judgement
from toolkit.evaluation.report.page import folded, paragraph, pictures, table
from toolkit.evaluation.report.pictures import RIGHT, TRUTH, WRONG, Pictures

WHOLE_IMAGES, OF_EACH_KIND, SUSPECTS, LISTED = 6, 4, 12, 200
LEGEND = (
    '<p class=dim><span class=sw style="background:#F0E442"></span> annotated (dashed), '
    '<span class=sw style="background:#56B4E9"></span> predicted and right, '
    '<span class=sw style="background:#D55E00"></span> predicted and wrong. '
    "A picture links to its image.</p>"
)


def images(judged: Judgement, maker: Pictures) -> str:
    counts, f1 = judged.image_counts, judged.image_f1
    with_boxes = np.flatnonzero(counts.sum(axis=1) > 0)
    mistakes = counts[:, 1] + counts[:, 2]
    worst = with_boxes[np.lexsort((-mistakes[with_boxes], f1[with_boxes]))]
    worst = worst[mistakes[worst] > 0][:WHOLE_IMAGES]
    best = with_boxes[np.lexsort((-counts[with_boxes, 0], -f1[with_boxes]))]
    best = best[~np.isin(best, worst)][:WHOLE_IMAGES]
    parts = []
    for heading, rows in (("Worst images", worst), ("Best images", best)):
        shown = pictures([whole_image(judged, maker, int(i)) for i in rows])
        parts.append(f"<h3>{heading}</h3>{shown}" if shown else "")
    return LEGEND + "".join(parts) if any(parts) else ""


def whole_image(judged: Judgement, maker: Pictures, image: int, name: str = "") -> str:
    """An image with everything above the threshold; `name` of the detector stands before the caption."""
    m = judged.matches
    truth = np.flatnonzero((m.truth.image_index == image) & ~m.crowd)
    found = np.flatnonzero((m.found.image_index == image) & (m.found.scores > judged.threshold) & m.counts)
    right, wrong, missed = judged.image_counts[image].tolist()
    marks = [Mark(m.truth.xyxy[row], TRUTH, dashed=True) for row in truth]
    marks += [_predicted(judged, row, RIGHT if m.right[row] else WRONG) for row in found[::-1]]
    if len(found) > 5:  # names on everything would hide the image
        marks = [mark if mark.colour == WRONG else replace(mark, text="") for mark in marks]
    counted = f"{right} right, {wrong} wrong, {missed} missed"
    caption = f"{name}{judged.table.image_name(image)}: F1 {judged.image_f1[image]:.2f}; {counted}"
    return maker.of(image, marks, caption)


def mistakes(judged: Judgement, maker: Pictures) -> str:
    m, parts = judged.matches, []
    for kind in KINDS[:-1]:
        rows = judged.errors.of(kind)
        rows = rows[np.argsort(-m.found.scores[rows], kind="stable")][:OF_EACH_KIND]
        shown = pictures([_mistake(judged, maker, int(row), kind) for row in rows])
        parts.append(f"<h3>{kind.capitalize()}: {MEANING[kind]}</h3>{shown}" if shown else "")
    missed = np.flatnonzero(judged.errors.missed)
    missed = missed[np.argsort(-m.truth.area[missed], kind="stable")][:OF_EACH_KIND]
    shown = pictures([_missed(judged, maker, int(row)) for row in missed])
    parts.append(f"<h3>Missed: {MEANING['missed']} (the largest)</h3>{shown}" if shown else "")
    return LEGEND + "".join(parts) if any(parts) else ""


def _mistake(judged: Judgement, maker: Pictures, row: int, kind: str) -> str:
    m = judged.matches
    image = int(m.found.image_index[row])
    near = m.gt[(m.det == row) & ~m.crowd[m.gt]]
    marks = [Mark(m.truth.xyxy[g], TRUTH, m.class_names[m.truth.labels[g]], dashed=True) for g in near]
    marks.append(_predicted(judged, row, WRONG))
    caption = f"{judged.table.image_name(image)}: {m.class_names[m.found.labels[row]]}, score {m.found.scores[row]:.2f}"
    overlap = m.iou[(m.det == row) & ~m.crowd[m.gt]]
    caption += f", largest IoU {overlap.max():.2f}" if len(overlap) else ", overlaps no box"
    return maker.of(image, marks, caption, focus=m.found.xyxy[row])


def _missed(judged: Judgement, maker: Pictures, row: int) -> str:
    m = judged.matches
    image, name = int(m.truth.image_index[row]), m.class_names[m.truth.labels[row]]
    box = m.truth.xyxy[row]
    caption = f"{judged.table.image_name(image)}: {name}"
    return maker.of(image, [Mark(box, TRUTH, name, dashed=True)], caption, focus=box)


def annotation_mistakes(judged: Judgement, maker: Pictures) -> str:
    if not judged.suspects:
        return ""
    counts = {kind: sum(each.kind == kind for each in judged.suspects) for kind in SUSPICIONS}
    rows = [(kind, counts[kind], words) for kind, words in SUSPICIONS.items()]
    chosen = [each for kind in SUSPICIONS for each in [s for s in judged.suspects if s.kind == kind][: SUSPECTS // 4]]
    shown = pictures([_suspect(judged, maker, each) for each in chosen])
    listed = [
        (judged.table.image_name(s.image), s.kind, f"{s.strength:.2f}", *_what(judged, s))
        for s in judged.suspects[:LISTED]
    ]
    head = ["image", "kind", "strength", "predicted", "annotated"]
    text = (
        "Where a detector that is mostly right disagrees with the annotation, either may be wrong: look before you "
        f"change a box. The {min(LISTED, len(judged.suspects))} strongest of {len(judged.suspects)} are listed; all, "
        "with their boxes, stand in report.json."
    )
    return (
        paragraph(text, "dim")
        + table(["kind", "boxes", "what it is"], rows, text=(0, 2))
        + LEGEND
        + shown
        + folded("The list", table(head, listed, text=(0, 1, 3, 4)))
    )


def _what(judged: Judgement, s: Suspect) -> tuple[str, str]:
    m = judged.matches
    predicted = f"{m.class_names[m.found.labels[s.det]]} {m.found.scores[s.det]:.2f}" if s.det >= 0 else "–"
    return predicted, m.class_names[m.truth.labels[s.gt]] if s.gt >= 0 else "–"


def _suspect(judged: Judgement, maker: Pictures, s: Suspect) -> str:
    m, marks = judged.matches, []
    if s.gt >= 0:
        marks.append(Mark(m.truth.xyxy[s.gt], TRUTH, m.class_names[m.truth.labels[s.gt]], dashed=True))
    if s.det >= 0:
        marks.append(_predicted(judged, s.det, RIGHT))
    predicted, annotated = _what(judged, s)
    focus = m.found.xyxy[s.det] if s.det >= 0 else m.truth.xyxy[s.gt]
    caption = f"{judged.table.image_name(s.image)}: {s.kind}; predicted {predicted}, annotated {annotated}"
    return maker.of(s.image, marks, caption, focus=focus)


def _predicted(judged: Judgement, row: int, colour: str) -> Mark:
    m = judged.matches
    return Mark(m.found.xyxy[row], colour, f"{m.class_names[m.found.labels[row]]} {m.found.scores[row]:.2f}")
