"""Writes the report of one detector, or of several: `index.html`, and `report.json` with its numbers."""

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
    write_text_atomic(folder / PAGE_FILE, page(title, _facts(judged, run), parts))
    return folder / PAGE_FILE


def _sections(judged: Judgement, run: RunFacts, folder: Path) -> list[tuple[str, str, str]]:
    if not judged.matches.num_truth.sum():
        return [("summary", "Summary", paragraph("There are no annotated boxes: nothing can be measured."))]
    maker = PictureMaker(judged.table, folder)
    annotation = gallery.annotation_mistakes(judged, maker)
    images = gallery.images(judged, maker)
    mistakes = gallery.mistakes(judged, maker)
    graphs = "" if judged.graphs is None else judged.graphs.section(judged, maker, page_parts)
    return [
        ("summary", "Summary", sections.summary_cards(judged)),
        ("next", "What to try next", sections.advice(advise(judged, run))),
        ("numbers", "Numbers", sections.numbers_table(judged)),
        ("thresholds", "Thresholds", sections.thresholds(judged)),
        ("graphs", "Scene graphs", graphs),
        ("confusion", "Confusion", sections.confusion(judged)),
        ("errors", "Mistakes", sections.errors(judged)),
        ("images", "Images", images + maker.notes()),
        ("confident", "Confident mistakes", mistakes),
        ("annotation", "Likely mistakes of the annotation", annotation),
    ]


def write_comparison(folder: Path, judged: Sequence[Judgement]) -> Path:
    """Write `index.html` with several detectors side by side to a folder, and `report.json` with their numbers and
    differences; return `index.html`.

    Raises:
        BadInput: the detectors were judged on different data.
    """
    folder = Path(folder)
    c = comparison.compare(judged)
    folder.mkdir(parents=True, exist_ok=True)
    maker = PictureMaker(judged[0].table, folder)
    changed = comparison.changed(c, maker)
    parts = [
        ("summary", "Summary", comparison.verdict(c)),
        ("numbers", "Numbers", comparison.numbers_side_by_side(c)),
        ("differences", "Differences", comparison.differences(c)),
        ("seeds", "Over seeds", comparison.seeds(c)),
        ("classes", "By class", comparison.classes(c)),
        ("images", "Images that changed most", changed + maker.notes()),
    ]
    title = "Comparison of " + ", ".join(judgement.name for judgement in judged)
    write_text_atomic(folder / PAGE_FILE, page(title, _data_words(judged[0]), parts))
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


def _facts(judged: Judgement | None, run: RunFacts) -> str:
    words = [run.state] if run.state else []
    if judged is not None:
        words += [str(judged.about["detector"])] if judged.about.get("detector") else []
        words.append(_data_words(judged))
    return "; ".join(words)


def _data_words(judged: Judgement) -> str:
    m = judged.matches
    counts = {"images": m.num_images, "boxes": int(m.num_truth.sum()), "crowd_regions": int(m.crowd.sum())}
    words = f"{judged.table.name}: {counted_boxes(counts)}, {m.num_classes} classes"
    if judged.table.class_map:
        words += f" (data.classes: {describe_class_map(judged.table.class_map)})"
    return words
