"""The page of a report: one file of HTML, with its pictures."""

import json
import re
from html.parser import HTMLParser
from urllib.parse import unquote

import pytest
from mask_data import random_masks
from report_data import ground_truth_as_predictions, predictions_of, random_case, table_of
from scene_graph_data import prediction

from toolkit.base.masks import Rle
from toolkit.evaluation.predictions import write_predictions
from toolkit.evaluation.shown_metrics import COCO_METRICS
from toolkit.run.status import RunStatus
from toolkit.tools.report import PREDICTIONS, gallery, sections, write_report
from toolkit.tools.report.facts import RunFacts
from toolkit.tools.report.judgement import judge
from toolkit.tools.report.write import write_comparison, write_page

VOID = {"meta", "link", "img", "br", "line", "circle", "polyline"}
BOX = [10, 10, 60, 70]


class Checker(HTMLParser):
    """Looks for tags that are left open, and for everything that a browser would fetch."""

    def __init__(self):
        super().__init__()
        self.open = []
        self.links = []

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        assert tag not in ("script", "iframe", "object")
        for key in ("src", "srcset", "href"):
            if key == "href" and tag == "a":
                self.links.append(attrs["href"])
            elif key in attrs and tag != "use":
                assert attrs[key].startswith("data:"), "nothing from elsewhere"
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):  # of SVG
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def checked(page) -> Checker:
    text = page.read_text(encoding="utf-8")
    checker = Checker()
    checker.feed(text)
    assert not checker.open
    assert not re.search(r"@import|url\((?!#)", text)
    return checker


def judged_of(table, predictions, name="x"):
    return judge(name, predictions, table, draws=5)


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data with <b> & ü")
    images = [
        [([10, 10, 50, 60], 0), ([70, 30, 120, 100], 1)],
        [([20, 20, 90, 90], 1)],
        [],
    ] * 4
    table = table_of(folder, images, ('<cat> & "co"', "dog|wolf"))
    found = [
        [
            ([12, 11, 50, 60], 0, 0.9),
            ([70, 30, 120, 100], 0, 0.8),
            ([5, 80, 40, 110], 1, 0.7),
        ],
        [([20, 20, 90, 60], 1, 0.85), ([20, 20, 92, 90], 1, 0.6)],
        [([20, 20, 60, 60], 0, 0.95)],
    ]
    return table, predictions_of(table, found * 4)


SECTIONS = "summary numbers thresholds confusion errors images confident annotation training settings"


def test_a_page_is_one_file_with_all_sections(case, tmp_path):
    table, predictions = case
    judged = judged_of(table, predictions, "try <1>")
    rows = []
    for step in range(1, 40):
        losses = {
            "train/loss": 1 / step,
            "train/loss_ce": 1 / step,
            "train/loss_ce_unscaled": 0.5 / step,
        }
        rows.append({"step": step, "epoch": 0, "train/lr/all": 0.1, "train/grad_norm": float(step)} | losses)
    rows.append(
        {
            "step": 40,
            "epoch": 0,
            "val/bbox_AP": 0.2,
            "val/loss_ce_unscaled": 0.3,
            "val/loss": 0.4,
        }
    )
    facts = RunFacts(rows, {}, "a: <1>", "{}", "Finished.")
    page = write_page(tmp_path / "report", judged, facts, "try <1>")
    text = page.read_text()
    links = checked(page).links
    for section in SECTIONS.split():
        assert f'id="{section}"' in text
        assert f"#{section}" in links
    for words in ("&lt;cat&gt; &amp; &quot;co&quot;", "loss_ce, unweighted", "validation"):
        assert words in text
    assert "<cat>" not in text
    files = [link for link in links if not link.startswith("#")]
    assert files
    assert all((page.parent / unquote(link)).is_file() for link in files)
    assert page.stat().st_size < 5_000_000
    numbers = json.loads((tmp_path / "report" / "report.json").read_text())
    assert numbers["threshold"] == judged.threshold
    assert numbers["thresholds"].keys() == set(table.class_names)
    assert len(numbers["annotation_mistakes"]) == len(judged.suspects) > 0
    assert numbers["ap_any_class"] > numbers["numbers"]["AP"], "a dog is found, and called a cat"
    assert [each["file_name"] for each in numbers["hard_negatives"]] == ["2.png", "5.png", "8.png", "11.png"]
    assert numbers["hard_negatives"][0]["best_score"] == 0.95
    for words in ("In 4 of 4 images without an annotated box", "If the class of a prediction did not matter"):
        assert words in text


def test_images_that_cannot_be_read_are_counted(tmp_path):
    table, predictions = random_case(tmp_path)  # there are no image files
    page = write_page(tmp_path / "page", judged_of(table, predictions), RunFacts(), "x")
    assert "cannot be read from here" in page.read_text()


@pytest.mark.parametrize(("boxes", "found"), [([], [(BOX, 0, 0.5)]), ([(BOX, 0)], [])])
def test_no_boxes_and_no_predictions_have_a_page(tmp_path, boxes, found):
    table = table_of(tmp_path, [boxes, []])
    judged = judged_of(table, predictions_of(table, [found, []]))
    checked(write_page(tmp_path / "page", judged, RunFacts(), "x"))


def test_a_comparison_is_one_file(case, tmp_path):
    table, predictions = case
    perfect = judged_of(table, ground_truth_as_predictions(table), "b")
    page = write_comparison(tmp_path, [judged_of(table, predictions, "a"), perfect])
    checked(page)
    text = page.read_text()
    assert "better by" in text
    assert "trained in" not in text  # nothing is known of it
    pictured = re.findall("<figure class=picture>.*?<figcaption>(.), ", text)
    assert pictured[:2] == ["a", "b"]  # the images that changed most, of the first and of the last
    content = json.loads((tmp_path / "report.json").read_text())
    assert len(content["detectors"]) == 2
    assert content["differences"][0]["metric"] == "AP"


class KeptMarks(gallery.PictureMaker):
    """Remembers what is drawn, and gives the caption alone."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.marks = []

    def figure(self, picture, caption, link=""):
        return caption

    def of(self, image, marks, caption, focus=None):
        self.marks += marks
        return super().of(image, marks, caption, focus)


def test_a_crowded_picture_names_its_mistakes_alone(tmp_path):
    boxes = [[20.0 * k, 0, 20 * k + 15, 20] for k in range(6)]
    table = table_of(tmp_path, [[(box, 0) for box in boxes]], size=(40, 140))
    found = [(box, int(k == 2), 0.9) for k, box in enumerate(boxes)]
    judged = judged_of(table, predictions_of(table, [found]))
    maker = KeptMarks(table, tmp_path)
    assert gallery.whole_image(judged, maker, 0).endswith("5 right, 1 wrong, 1 missed")
    assert [mark.colour for mark in maker.marks if mark.text] == [gallery.TRUTH_COLOUR, gallery.WRONG_COLOUR]


def test_a_wrong_place_is_measured_at_an_object_of_the_class(tmp_path):
    """Not at one of another class, which the prediction overlaps more."""
    table = table_of(tmp_path, [[([0, 0, 100, 100], 0), ([60, 0, 100, 100], 1)]])
    judged = judged_of(table, predictions_of(table, [[([60, 0, 100, 100], 0, 0.9)]]))
    assert "cat, score 0.90, IoU 0.40 with cat" in gallery.mistakes(judged, KeptMarks(table, tmp_path))


def test_pictures_are_named_by_their_files(tmp_path):
    table = table_of(tmp_path, [[(BOX, 0)]] * 40)
    found = [[(BOX, 0, 0.8)]] * 40
    found[3] = [([80, 10, 130, 70], 1, 0.9)]
    judged = judged_of(table, predictions_of(table, found))
    text = write_page(tmp_path / "page", judged, RunFacts(), "x").read_text()
    captions = re.findall("<figure class=picture>.*?<figcaption>(.*?)</figcaption>", text)
    assert any(caption.startswith("3.png (id 13): F1 0.00") for caption in captions)
    for caption in captions:
        assert re.match(r"\d+\.png \(id \d+\): ", caption)
    assert "<td class=text>3.png (id 13)</td>" in text  # the list of likely mistakes of the annotation
    mistakes = json.loads((tmp_path / "page" / "report.json").read_text())["annotation_mistakes"]
    assert {(each["file_name"], each["image_id"]) for each in mistakes} == {("3.png", 13)}


@pytest.fixture(scope="module")
def masks(tmp_path_factory):
    table, predictions = random_masks(tmp_path_factory.mktemp("masks"), 6, 2, seed=9, draw=True)
    boxes = {}
    for image_id, found in predictions.items():
        boxes[image_id] = {key: value for key, value in found.items() if key != "masks"}
    return judged_of(table, predictions, "masks"), judged_of(table, boxes, "boxes")


def test_a_page_of_masks_has_their_numbers(masks, tmp_path):
    of_masks, of_boxes = masks
    text = write_page(tmp_path / "masks", of_masks, RunFacts(), "masks").read_text()
    assert "segm_AP" in text
    assert "<span>masks: AP</span>" in text
    assert "<span>boxes: AP</span>" in text
    assert "IoU of masks 0.5" in text
    plain = write_page(tmp_path / "boxes", of_boxes, RunFacts(), "boxes").read_text()
    assert "segm_" not in plain
    assert "<span>AP</span>" in plain
    assert "masks 0.5" not in plain


@pytest.mark.parametrize(
    ("mode", "shown"),
    [("predcls", ["summary", "graphs"]), ("sgcls", ["summary", "graphs", "confusion"])],
)
def test_sections_on_finding_boxes_are_left_out_where_they_are_given(tmp_path, mode, shown):
    objects = [([0, 0, 20, 20], 0), ([50, 50, 80, 80], 1), ([0, 60, 30, 90], 2)]
    images = [{"objects": objects, "relations": [(0, 1, 1), (2, 0, 0)]}]
    table = table_of(tmp_path / "data", images, ("a", "b", "c"), predicates=("on", "of"))
    judged = judge("x", {10: prediction("0 1 1, 2 0 1", 2)}, table, {"mode": mode}, draws=2)
    text = write_page(tmp_path, judged, RunFacts(), "x").read_text()
    assert re.findall('<section id="(.*?)">', text) == shown
    cards = re.findall("<div><span>(.*?)</span>", text)
    assert cards == [f"R@20, {mode}", f"mR@20, {mode}", f"ngR@50, {mode}", "complete images"]
    assert "mean of the recalls of the predicates" in text


def test_a_comparison_has_the_metrics_that_all_have(masks, tmp_path):
    of_masks, of_boxes = masks
    write_comparison(tmp_path / "both", [of_masks, of_boxes])
    content = json.loads((tmp_path / "both" / "report.json").read_text())
    assert {each["metric"] for each in content["differences"]} <= set(COCO_METRICS)
    assert "segm_AP" in write_comparison(tmp_path / "twice", [of_masks, of_masks]).read_text()


def test_pictures_of_a_report_have_masks(masks, tmp_path):
    judged, _ = masks
    maker = KeptMarks(judged.table, tmp_path)
    gallery.images(judged, maker)
    gallery.mistakes(judged, maker)
    assert maker.marks
    assert all(isinstance(mark.mask, Rle) for mark in maker.marks)


def test_the_report_of_a_run_judges_its_predictions_and_says_what_goes_on(tmp_path):
    table, predictions = random_case(tmp_path / "data", crowd=0)
    run = tmp_path / "runs" / "mine"
    report = run / "report"
    assert "index.html" in write_report(run).read_text()  # nothing yet, and no failure
    checked(report / "index.html")
    assert not (report / "report.json").exists()
    write_predictions(report / PREDICTIONS, predictions, table, detector="mine, step 40 (raw weights)")
    rows = []
    for step in (20, 40):
        rows += [{"step": step, "epoch": step // 20, "train/loss": 1.0}]
        rows += [{"step": step, "epoch": step // 20, "val/bbox_AP": 0.01 * step}]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (run / "config.yaml").write_text("model: {}\nrun: {epochs: 100, max_minutes: 4.75}\n")
    (run / "environment.json").write_text('{"command_line": ["scripts/train_detr.py", "--run.name", "mine"]}')
    (run / "status.json").write_text('{"state": "running"}')
    status = RunStatus(run, is_main=True)
    status.details["ended_by"] = ["run.max_minutes"]
    status.begin()
    write_report(run, table, state="done")
    page = (report / "index.html").read_text()
    first = re.search("<div class=advice>(.*?)</div>", page)[1]
    for words in (
        "0.200 at step 20, 0.400 at step 40",
        "training ended by run.max_minutes (the minutes",
    ):
        assert words in first
    command = re.sub("</?code>", "", re.search("<pre>(.*)</pre>", first)[1])
    begin = f"accelerate launch scripts/train_detr.py --config {run}/config.yaml --run.resume latest "
    assert command.startswith(begin)
    assert command.endswith(" --run.resume_schedule new --run.max_minutes 9.5")
    assert "run.epochs" not in first
    assert "Finished after 40 steps (run.max_minutes). Evaluated: weights of step 40 on 30 images, " in page
    assert f"<p class=dim>Data: {table.name}</p>" in page
    assert json.loads((report / "report.json").read_text())["images"] == len(table)


def test_wanted_precisions_with_one_threshold_are_one_row(tmp_path):
    table = table_of(tmp_path, [[(BOX, 0)]] * 4, draw=False)
    found = [[(BOX, 0, 0.9)], [(BOX, 0, 0.9)], [(BOX, 1, 0.8)], [(BOX, 0, 0.7)]]
    judged = judged_of(table, predictions_of(table, found))
    rows = re.findall("<tr><td class=text>(.*?)</td><td>(.*?)</td>", sections.thresholds(judged))
    assert [name for name, _ in rows] == ["best F1", "precision of 0.5 to 0.75", "precision of 0.9 to 0.99"]
