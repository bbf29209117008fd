"""The HTML of a report, its pictures and its advice."""

import json
import re
from dataclasses import fields
from html.parser import HTMLParser
from urllib.parse import unquote

import numpy as np
import pytest
from report_data import (
    ground_truth_as_predictions,
    predictions_of,
    random_case,
    table_of,
)

from toolkit.evaluation.predictions import write_predictions
from toolkit.index import DETECTORS
from toolkit.models import options_class
from toolkit.run.status import RunStatus
from toolkit.tools.report import PREDICTIONS, figures, gallery, sections, write_report
from toolkit.tools.report.advice import MORE_BOXES, advise
from toolkit.tools.report.charts import (
    MAX_POINTS,
    SERIES_COLOURS,
    BarChart,
    ChartLine,
    LineChart,
    figure,
    save_charts,
    svg,
)
from toolkit.tools.report.facts import RunFacts, run_facts
from toolkit.tools.report.judgement import judge
from toolkit.tools.report.thresholds import ThresholdSweep
from toolkit.tools.report.write import write_comparison, write_page


class Checker(HTMLParser):
    """Tags that are left open, and everything that a browser would fetch."""

    VOID = {"meta", "link", "img", "br", "line", "circle", "polyline"}

    def __init__(self):
        super().__init__()
        self.open, self.fetched, self.links, self.faults = [], [], [], []

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.fetched += [attrs[key] for key in ("src", "srcset") if key in attrs]
        self.fetched += [attrs["href"]] if tag == "link" else []
        self.links += [attrs["href"]] if tag == "a" else []
        self.faults += [tag] if tag in ("script", "iframe", "object") else []
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):  # of SVG
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.faults.append(f"</{tag}>")


def checked(path) -> Checker:
    checker, text = Checker(), path.read_text(encoding="utf-8")
    checker.feed(text)
    assert not checker.open and not checker.faults
    assert all(source.startswith("data:") for source in checker.fetched), "nothing from elsewhere"
    assert not re.search(r"@import|url\((?!#)", text)
    return checker


def judged_of(table, predictions, name="x"):
    return judge(name, predictions, table, draws=5)


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data with <b> & ü")
    images = [[([10, 10, 50, 60], 0), ([70, 30, 120, 100], 1)], [([20, 20, 90, 90], 1)], []] * 4
    table = table_of(folder, images, ('<cat> & "co"', "dog|wolf"))
    found = [
        [([12, 11, 50, 60], 0, 0.9), ([70, 30, 120, 100], 0, 0.8), ([5, 80, 40, 110], 1, 0.7)],
        [([20, 20, 90, 60], 1, 0.85), ([20, 20, 92, 90], 1, 0.6)],
        [([20, 20, 60, 60], 0, 0.95)],
    ] * 4
    return table, predictions_of(table, found)


def test_a_page_is_one_file_with_all_sections(case, tmp_path):
    table, predictions = case
    judged = judged_of(table, predictions, "try <1>")
    rows = [{"step": s, "epoch": 0, "train/loss": 1 / s, "train/loss_ce": 1 / s, "train/loss_ce_unscaled": 0.5 / s,
             "train/lr/all": 0.1, "train/grad_norm": float(s)} for s in range(1, 40)]  # fmt: skip
    rows += [{"step": 40, "epoch": 0, "val/bbox_AP": 0.2, "val/loss_ce_unscaled": 0.3, "val/loss": 0.4}]
    page = write_page(tmp_path / "report", judged, RunFacts(rows, {}, "a: <1>", "{}", "state done"), "try <1>")
    text, links = page.read_text(), checked(page).links
    for section in "summary numbers thresholds confusion errors images confident annotation training settings".split():
        assert f'id="{section}"' in text and f"#{section}" in links
    assert "&lt;cat&gt; &amp; &quot;co&quot;" in text and "<cat>" not in text
    assert "loss_ce, unweighted" in text and "validation" in text
    files = [link for link in links if not link.startswith("#")]
    assert files and all((page.parent / unquote(link)).is_file() for link in files)
    assert page.stat().st_size < 5_000_000
    numbers = json.loads((tmp_path / "report" / "report.json").read_text())
    assert numbers["threshold"] == judged.threshold and numbers["thresholds"].keys() == set(table.class_names)
    assert len(numbers["annotation_mistakes"]) == len(judged.suspects) > 0


def test_images_that_cannot_be_read_and_data_without_boxes(tmp_path):
    table, predictions = random_case(tmp_path / "a")  # there are no image files
    page = write_page(tmp_path / "r", judged_of(table, predictions), RunFacts(), "x")
    assert "cannot be read from here" in page.read_text()
    empty = table_of(tmp_path / "b", [[], []])
    for name, data, found in (("s", empty, [[([0, 0, 9, 9], 0, 0.5)], []]), ("t", table, [[]] * len(table))):
        checked(write_page(tmp_path / name, judged_of(data, predictions_of(data, found)), RunFacts(), "x"))


def test_a_comparison_is_one_file(case, tmp_path):
    table, predictions = case
    page = write_comparison(tmp_path, [judged_of(table, predictions, "a"),
                                       judged_of(table, ground_truth_as_predictions(table), "b")])  # fmt: skip
    checked(page)
    assert "better by" in page.read_text()
    pictured = re.findall("<figure class=picture>.*?<figcaption>(.), ", page.read_text())
    assert pictured[:2] == ["a", "b"], "the images that changed most, of the first and of the last"
    content = json.loads((tmp_path / "report.json").read_text())
    assert len(content["detectors"]) == 2 and content["differences"][0]["metric"] == "AP"
    assert "trained in" not in page.read_text(), "nothing is known of it"


@pytest.mark.parametrize("precisions", [("bf16", "no"), ("bf16", "bf16"), ("bf16", None)])
def test_a_comparison_says_the_precisions_that_detectors_were_trained_in(case, tmp_path, precisions):
    table, predictions = case
    abouts = [{} if precision is None else {"precision": precision} for precision in precisions]
    judged = [judge(name, predictions, table, about, draws=2) for name, about in zip("ab", abouts, strict=True)]
    text = write_comparison(tmp_path, judged).read_text()
    words = {"bf16": "bfloat16", "no": "float32", None: "?"}
    cells = "".join(f"<td>{words[precision]}</td>" for precision in precisions)
    assert cells in re.sub(r"<td[^>]*>", "<td>", text.partition("trained in")[2])
    assert ("trained in different precisions (a in bfloat16, b in float32)" in text) == (precisions == ("bf16", "no"))
    content = json.loads((tmp_path / "report.json").read_text())
    assert [detector["precision"] for detector in content["detectors"]] == list(precisions)


def test_a_crowded_picture_names_its_mistakes_alone(tmp_path):
    boxes = [[20.0 * k, 0, 20 * k + 15, 20] for k in range(6)]
    found = {10: {"boxes": np.array(boxes), "labels": np.array([0, 0, 1, 0, 0, 0]), "scores": np.full(6, 0.9)}}
    judged = judge("a", found, table_of(tmp_path, [[(box, 0) for box in boxes]], size=(40, 140)), draws=2)

    class Marks(gallery.PictureMaker):
        def figure(self, picture, caption, link=""):
            return caption

        def of(self, image, marks, caption, focus=None):
            self.marks = marks
            return super().of(image, marks, caption, focus)

    assert gallery.whole_image(judged, maker := Marks(judged.table, tmp_path), 0).endswith("5 right, 1 wrong, 1 missed")
    assert [mark.colour for mark in maker.marks if mark.text] == [gallery.WRONG_COLOUR]


def test_charts_of_odd_values(tmp_path):
    lines = ChartLine("a", [], []), ChartLine("a", [1], [np.nan])
    nothing = [*(LineChart("x", [line]) for line in lines), BarChart("x", [])]
    nothing.append(LineChart("x", [ChartLine("a", [1, 2], [0, -1])], log=True))
    assert [svg(chart) for chart in nothing] == [""] * 4 and save_charts(nothing, tmp_path / "a.png") is None
    axes = figure([LineChart("x", [ChartLine("a", [0, 1], [0, 1])], marks=[(0.6, "best")])]).axes[0]
    assert axes.lines[1].get_xdata() == [0.6, 0.6] and axes.texts[0].get_text() == "best"
    rates = [{"step": step, "train/lr/a": 1e-3, "train/lr/b": 1e-3} for step in (1, 2)]
    chart = next(c for c in figures.training_charts(rows=rates)[figures.LOSSES_HEADING] if c.title == "Learning rates")
    assert [line.dashed for line in chart.lines] == [False, True], "one curve over the other"
    sweep = ThresholdSweep(*np.array([[0.5], [0.2], [0.1], [0.15]]), total=10)
    for chart in (figures.f1_chart({"a": sweep}), figures.precision_recall_chart({"a": sweep})):
        axes = figure([chart]).axes[0]
        assert axes.get_xlim() == axes.get_ylim() == (0, 1)
    assert "<use" in svg(LineChart("x", [ChartLine("a", [1], [2])])), "one point is a dot"
    assert len(ChartLine("a", range(10**5), np.random.default_rng(0).random(10**5)).points()[0]) == MAX_POINTS
    odd = svg(LineChart("x", [ChartLine("a", [1, 2, 3], [1e-30, np.inf, 1e30])], log=True))
    assert "nan" not in odd and "inf" not in odd


def test_a_chart_has_the_colours_of_the_page_and_says_its_words_as_they_are(tmp_path):
    lines = [ChartLine("0.12345 <b>", [1, 2], [1, 2]), ChartLine("$x", [1, 2], [2, 1], 1), ChartLine("none", [], [])]
    text = svg(LineChart("0.6789 & so", lines, "step"))
    assert "0.12345 &lt;b&gt;" in text and ">$x<" in text and "0.6789 &amp; so" in text and "none<" not in text
    assert "var(--c0)" in text and "var(--c1)" in text and not re.search('#[0-9a-f]{6}[;"]', text)
    faint = LineChart("x", [ChartLine("", [1, 2], [0, 99], faint=True), ChartLine("a", [1, 2], [1, 2])])
    assert figure([faint]).axes[0].get_ylim()[1] < 3, "faint lines do not set the ends of the axis"
    path = save_charts([faint, LineChart("y", lines)], tmp_path / "new" / "a.png")
    assert SERIES_COLOURS[1] == "#d55e00" and path.stat().st_size > 1000


def topics(*arguments) -> dict[str, str]:
    return {advice.topic: advice.evidence for advice in advise(*arguments)}


def test_each_advice_has_its_evidence(tmp_path):
    table, predictions = random_case(tmp_path, crowd=0)
    assert topics(judged_of(table, ground_truth_as_predictions(table))).keys() <= {"Threshold"}
    judged = judged_of(table, predictions)
    rising = [{"step": s, "val/bbox_AP": 0.02 * s, "val/loss": 1.0} for s in range(1, 9)]
    for rows in (rising, rising[::7]):  # two evaluations are enough
        assert "Trained too short" in topics(judged, RunFacts(rows))
        assert "Trained too short" not in topics(judged, RunFacts([r | {"val/bbox_AP": 0.1} for r in rows]))
    assert "Trained too short" not in topics(judged, RunFacts(rising[:1]))
    over = [{"step": s, "train/loss": 1 / s} for s in range(1, 60)]
    over += [{"step": 10 * s, "val/loss": 1 + abs(s - 2), "val/bbox_AP": 0.3 - 0.02 * abs(s - 2)} for s in range(1, 7)]
    assert "Over-fitting" in topics(judged, RunFacts(over)) and "Over-fitting" not in topics(judged, RunFacts(rising))
    most = int(np.bincount(judged.matches.truth.image_index).max())
    for queries in (most, 10 * most):
        facts = RunFacts(config={"model": {"num_queries": queries}})
        assert ("Too few queries" in topics(judged, facts)) == (queries == most)


def test_small_objects_have_the_size_that_tiles_show_them_at(tmp_path):
    """Half of the objects are small and not found; in tiles of 40 of pictures of 160 px they are seen much larger."""
    small, large = [10, 10, 30, 30], [40, 40, 110, 110]
    table = table_of(tmp_path, [[(small, 0), (large, 1)]] * 10, draw=False)
    judged = judged_of(table, predictions_of(table, [[([60, 60, 70, 70], 0, 0.5), (large, 1, 0.9)]] * 10))
    evidence = {}
    for tile in (None, [80, 80], [40, 40]):
        data = {"image_size": 80, "tile": tile, "tile_overlap": 0.2, "tile_visible": 0.25}
        found = {each.topic: each for each in advise(judged, RunFacts(config={"data": data}))}
        evidence[str(tile)] = found.get("Small objects")
    assert "smaller than 12 pixels" in evidence["None"].evidence and "--data.tile." in evidence["None"].advice
    assert "smaller than 20 pixels" in evidence["[80, 80]"].evidence and "(now [80, 80])" in evidence["[80, 80]"].advice
    assert evidence["[40, 40]"] is None, "they are seen at 40 pixels"


PLANNED_EPOCHS, STEPS_PER_EPOCH = 100, 10


def run_ended(folder, share, metric_of, ended_by, epochs=PLANNED_EPOCHS, evaluations=8):
    """Facts of a run that ended after this share of its planned epochs; metric_of: its AP by the share of its steps."""
    folder.mkdir(parents=True)
    last, images = round(share * epochs * STEPS_PER_EPOCH), 4 * STEPS_PER_EPOCH
    rows = [{"step": s, "epoch": (s - 1) // STEPS_PER_EPOCH, "train/loss": 1.0} for s in range(1, last + 1)]
    for number in range(1, evaluations + 1):
        step = round(last * number / evaluations)
        rows.append({"step": step, "epoch": (step - 1) // STEPS_PER_EPOCH, "val/bbox_AP": metric_of(step / last)})
    write_rows_of_log(folder / "metrics.jsonl", sorted(rows, key=lambda row: row["step"]))
    settings = {"run": {"epochs": epochs}, "data": {"batch_size_per_device": 2}, "optim": {"accumulation_steps": 1}}
    (folder / "config.yaml").write_text(json.dumps(settings))
    environment = {"command_line": ["scripts/train_ssd.py"], "processes": 2, "data": {"train": {"images": images}}}
    (folder / "environment.json").write_text(json.dumps(environment))
    (folder / "status.json").write_text(json.dumps({"state": "done", "reason": "ended", "ended_by": [ended_by]}))
    return run_facts(folder)


def write_rows_of_log(file, rows):
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


@pytest.fixture(scope="module")
def confusing(tmp_path_factory):
    """A detector that finds boxes and takes most cats for dogs: one advice about data, whatever its run."""
    box = [10, 10, 60, 70]
    table = table_of(tmp_path_factory.mktemp("confusing"), [[(box, i % 2)] for i in range(30)], draw=False)
    judged = judged_of(table, predictions_of(table, [[(box, int(i % 5 > 0), 0.9 - i / 100)] for i in range(30)]))
    assert "Confused classes" in topics(judged)
    return judged


@pytest.mark.parametrize("share", [0.016, 0.099, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("ended_by", ["run.epochs", "run.max_steps", "run.max_minutes", "eval.early_stopping_patience"])
def test_a_run_that_has_barely_begun_and_still_rises_is_only_told_to_train_longer(tmp_path, confusing, share, ended_by):
    rising = run_ended(tmp_path / "rising", share, lambda made: 0.5 * made, ended_by)
    level = run_ended(tmp_path / "level", share, lambda made: 0.4 + 0.003 * (made > 0.8), ended_by)
    has_begun = share < 0.1 and ended_by != "eval.early_stopping_patience"
    found = topics(confusing, rising)
    assert next(iter(found)) == "Trained too short" and ("Confused classes" in found) != has_begun
    assert not has_begun or f"in epoch {2 if share == 0.016 else 10} of 100" in found["Trained too short"]
    assert "AP was still rising" in found["Trained too short"]
    found = topics(confusing, level)
    assert "Trained too short" not in found and "Confused classes" in found, "its length is not what it lacks"


@pytest.mark.parametrize(("epochs", "share"), [(4, 0.05), (12, 0.09), (4, 0.2), (12, 0.11)])
def test_a_tenth_of_few_epochs_is_counted_in_steps(tmp_path, confusing, epochs, share):
    facts = run_ended(tmp_path / "run", share, lambda made: 0.5 * made, "run.max_steps", epochs, evaluations=2)
    assert facts.epochs_made == pytest.approx(round(share * epochs * STEPS_PER_EPOCH) / STEPS_PER_EPOCH)
    assert (list(topics(confusing, facts)) == ["Trained too short"]) == (share < 0.1)


def test_a_run_without_evaluations_enough_has_barely_begun(tmp_path, confusing):
    """Whether AP still rises is not known then."""
    facts = run_ended(tmp_path / "run", 0.016, lambda made: 0.4, "run.max_minutes", evaluations=1)
    assert list(topics(confusing, facts)) == ["Trained too short"]


def test_the_report_of_a_run_has_its_predictions_and_says_what_ended_it_and_what_goes_on(tmp_path):
    table, predictions = random_case(tmp_path / "data", crowd=0)
    run = tmp_path / "runs" / "mine"
    assert "index.html" in write_report(run).read_text()  # nothing yet, and no failure
    checked(run / "report" / "index.html")
    assert not (run / "report" / "report.json").exists()
    write_predictions(run / "report" / PREDICTIONS, predictions, table, detector="mine, step 40 (raw weights)")
    rows = [{"step": s, "epoch": s // 20, kind: 0.01 * s} for s in (20, 40) for kind in ("train/loss", "val/bbox_AP")]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (run / "config.yaml").write_text("model: {}\nrun: {epochs: 100, max_minutes: 4.75}\n")
    (run / "environment.json").write_text('{"command_line": ["scripts/train_detr.py", "--run.name", "mine"]}')
    (run / "status.json").write_text('{"state": "running"}')
    status = RunStatus(run, is_main=True)
    status.details["ended_by"] = ["run.max_minutes"]
    status.begin()
    write_report(run, table, state="done")
    page = (run / "report" / "index.html").read_text()
    first = re.search("<div class=advice>(.*?)</div>", page)[1]
    assert "0.200 at step 20, 0.400 at step 40" in first and "training ended by run.max_minutes (the minutes" in first
    assert f"<pre>accelerate launch scripts/train_detr.py --config {run}/config.yaml --run.resume latest " in first
    assert "--run.resume_schedule new --run.max_minutes 9.5</pre>" in first and "run.epochs" not in first
    assert "state done, reason training ended by run.max_minutes" in page and "step 40 (raw weights)" in page
    assert json.loads((run / "report" / "report.json").read_text())["images"] == len(table)


def test_pictures_are_named_by_their_files(tmp_path):
    box = [10, 10, 60, 70]
    table = table_of(tmp_path, [[(box, 0)]] * 40)
    found = [[([80, 10, 130, 70], 1, 0.9)] if i == 3 else [(box, 0, 0.8)] for i in range(40)]
    page = write_page(tmp_path / "page", judged_of(table, predictions_of(table, found)), RunFacts(), "x").read_text()
    captions = re.findall("<figure class=picture>.*?<figcaption>(.*?)</figcaption>", page)
    assert captions and all(re.match(r"\d+\.png \(id \d+\): ", caption) for caption in captions), captions
    assert any(caption.startswith("3.png (id 13): F1 0.00") for caption in captions)
    assert "<td class=text>3.png (id 13)</td>" in page, "the list of likely mistakes of the annotation"
    numbers = json.loads((tmp_path / "page" / "report.json").read_text())
    assert {(each["file_name"], each["image_id"]) for each in numbers["annotation_mistakes"]} == {("3.png", 13)}


def test_twins_and_confusions_are_named_with_their_flag(tmp_path):
    boxes = [np.array([10 + i % 5, 10, 60, 70]) for i in range(30)]
    table = table_of(tmp_path, [[(box, i % 2)] for i, box in enumerate(boxes)], draw=False)
    scores = np.random.default_rng(0).random(30)
    twins = [[(box + k, i % 2, scores[i] * (1 - k / 100)) for k in range(3)] for i, box in enumerate(boxes)]
    wrong = [[(box, 1 if i % 3 else i % 2, scores[i])] for i, box in enumerate(boxes)]
    settings = RunFacts(config={"model": {"nms_threshold": 0.9}})
    advice = {a.topic: a for a in advise(judged_of(table, predictions_of(table, twins)), settings)}
    assert "<code>--model.nms_threshold</code> (now 0.9)" in sections.advice([advice["Duplicates"]])
    assert "60" in advice["Duplicates"].evidence and "Confused classes" not in advice
    confused = topics(judged_of(table, predictions_of(table, wrong)))
    assert "cat is taken for dog: 10 of 15" in confused["Confused classes"] and "Duplicates" not in confused


def test_a_detector_that_finds_nothing_is_told_why(tmp_path):
    table = table_of(tmp_path, [[([10, 10, 60, 70], 0)]] * 20, draw=False)
    small = predictions_of(table, [[([10 / 160, 10 / 120, 60 / 160, 70 / 120], 0, 0.9)]] * 20)
    ((topic, evidence),) = topics(judged_of(table, small)).items()
    assert topic == "Hardly anything is found" and "normalised" in evidence


def test_settings_that_the_advice_for_crowded_images_names_exist():
    known = {each.name for architecture in DETECTORS for each in fields(options_class(architecture))}
    assert set(MORE_BOXES) <= known
