"""Writes the report of one detector, or of several: `index.html`, and `report.json` with its numbers."""

import re
from collections.abc import Sequence
from pathlib import Path

from toolkit.base.files import replace_nonfinite, write_json, write_text_atomic
from toolkit.data.classes import describe_class_map
from toolkit.data.splits import counted_boxes
from toolkit.tools.report import comparison, gallery, sections
from toolkit.tools.report import page as page_parts
from toolkit.tools.report.advice import advise
from toolkit.tools.report.facts import RunFacts
from toolkit.tools.report.gallery import PictureMaker
from toolkit.tools.report.judgement import Judgement, as_json
from toolkit.tools.report.page import page, paragraph

PAGE_FILE = "index.html"
REPORT_FILE = "report.json"
OF_A_RUN = re.compile(r".*, step (\d+) \((ema|model|raw) weights\)")  # the description of a run's detector


def write_page(folder: Path, judged: Judgement | None, run: RunFacts, title: str) -> Path:
    """Write `index.html` to a folder, and `report.json` if a detector was judged; return `index.html`.

    Args:
        judged: the statistics of the detector; None: there are no predictions, and the page has only the curves and
            settings of the run.
        run: the facts about the run.
        title: title of the page.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    parts: list[tuple[str, str, str]] = []
    if judged is not None:
        parts = _sections(judged, run, folder)
        write_json(folder / REPORT_FILE, replace_nonfinite(as_json(judged)))
    parts.append(("training", "Training", sections.training(run)))
    parts.append(("settings", "Settings", sections.settings_and_environment(run)))
    write_text_atomic(folder / PAGE_FILE, page(title, _subtitles(judged, run), parts))
    return folder / PAGE_FILE


def _sections(judged: Judgement, run: RunFacts, folder: Path) -> list[tuple[str, str, str]]:
    if not judged.matches.num_truth.sum():
        return [("summary", "Summary", paragraph("There are no annotated boxes: nothing can be measured."))]
    if judged.boxes_given:
        return _sections_of_given_boxes(judged, run, folder)
    maker = PictureMaker(judged.table, folder)
    annotation = gallery.annotation_mistakes(judged, maker)
    images = gallery.images(judged, maker) + gallery.hard_negatives(judged, maker)
    mistakes = gallery.mistakes(judged, maker)
    graphs = "" if judged.graphs is None else judged.graphs.section(judged, maker, page_parts)
    return [
        ("summary", "Summary", sections.summary_cards(judged)),
        ("next", "What to try next", sections.advice(advise(judged, run))),
        ("graphs", "Scene graphs", graphs),
        ("numbers", "Numbers", sections.numbers_table(judged)),
        ("thresholds", "Thresholds", sections.thresholds(judged)),
        ("confusion", "Confusion", sections.confusion(judged)),
        ("errors", "Mistakes", sections.errors(judged)),
        ("images", "Images", images + maker.notes()),
        ("confident", "Confident mistakes", mistakes),
        ("annotation", "Annotation errors?", annotation),
    ]


def _sections_of_given_boxes(judged: Judgement, run: RunFacts, folder: Path) -> list[tuple[str, str, str]]:
    """Return the sections on a detector that was given the boxes: those on finding them would be all 1 and empty."""
    maker = PictureMaker(judged.table, folder)
    graphs = judged.graphs.section(judged, maker, page_parts)
    return [
        ("summary", "Summary", sections.summary_cards(judged)),
        ("next", "What to try next", sections.advice(advise(judged, run))),
        ("graphs", "Scene graphs", graphs + maker.notes()),
        ("confusion", "Confusion", "" if judged.graphs.classes_given else sections.confusion(judged)),
    ]


def write_comparison(
    folder: Path, judged: Sequence[Judgement], title: str = "", head: Sequence[tuple[str, str, str]] = ()
) -> Path:
    """Write `index.html` with several detectors side by side to a folder, and `report.json` with their numbers and
    differences; return `index.html`.

    Args:
        title: title of the page; "": the names of the detectors.
        head: sections that come first, as `page` takes them.

    Raises:
        BadInput: the detectors were judged on different data.
    """
    folder = Path(folder)
    c = comparison.compare(judged)
    folder.mkdir(parents=True, exist_ok=True)
    maker = PictureMaker(judged[0].table, folder)
    changed = comparison.changed(c, maker)
    parts = [
        *head,
        ("summary", "Summary", comparison.verdict(c)),
        ("numbers", "Numbers", comparison.numbers_side_by_side(c)),
        ("differences", "Differences", comparison.differences(c)),
        ("seeds", "Over seeds", comparison.seeds(c)),
        ("classes", "By class", comparison.classes(c)),
        ("images", "Images that changed most", changed + maker.notes()),
    ]
    title = title or "Comparison of " + ", ".join(judgement.name for judgement in judged)
    lines = [f"Evaluated on {_counts(judged[0])}.", _data(judged[0])]
    write_text_atomic(folder / PAGE_FILE, page(title, lines, parts))
    differences = [
        {name: getattr(d, name) for name in ("metric", "base", "other", "value")}
        | {"interval_95": [d.low, d.high], "explained_by_chance": d.chance}
        for d in c.differences
    ]
    content = {
        "detectors": list(map(as_json, judged)),
        "differences": differences,
        "over_seeds": c.groups,
    }
    write_json(folder / REPORT_FILE, replace_nonfinite(content))
    return folder / PAGE_FILE


def _subtitles(judged: Judgement | None, run: RunFacts) -> list[str]:
    """Return the lines below the title: how the run ended and what was evaluated, and on which data."""
    if judged is None:
        return [run.state] if run.state else []
    evaluated = f"Evaluated: {_detector(judged)} on {_counts(judged)}."
    return [f"{run.state} {evaluated}".lstrip(), _data(judged)]


def _detector(judged: Judgement) -> str:
    described = str(judged.about.get("detector") or judged.name)
    of_a_run = OF_A_RUN.fullmatch(described)
    if of_a_run is None:
        return described
    step, kind = of_a_run.groups()
    return f"{'averaged weights' if kind == 'ema' else 'weights'} of step {step}"


def _counts(judged: Judgement) -> str:
    m = judged.matches
    counts = {"images": m.num_images, "boxes": int(m.num_truth.sum()), "crowd_regions": int(m.crowd.sum())}
    words = f"{counted_boxes(counts)}, {m.num_classes} classes"
    if judged.table.class_map:
        words += f" (data.classes: {describe_class_map(judged.table.class_map)})"
    return words


def _data(judged: Judgement) -> str:
    return f"Data: {judged.table.name}"
