"""What a run's detector begins as, and the same one from its folder."""

import ast
import json
from dataclasses import asdict, replace

import pytest
import torch
from places import ROOT

from toolkit.base.errors import BadInput
from toolkit.data.formats import open_dataset
from toolkit.data.table import Category, JoinedSet
from toolkit.detectors.scene_graphs.evaluator import SceneGraphEvaluator
from toolkit.detectors.scene_graphs.options import SceneGraphOptions
from toolkit.detectors.scene_graphs.start import start_scene_graph
from toolkit.detectors.ssd.options import SsdliteOptions
from toolkit.evaluation.coco import CocoEvaluator, make_evaluator
from toolkit.index import DETECTORS
from toolkit.models import build_detector, options_class
from toolkit.models.final import load_detector_folder
from toolkit.models.start import start_detector
from toolkit.tools.predict.open import rebuild_detector
from toolkit.tools.shapes import make_shapes

CLASSES = ["a", "b"]
CATEGORIES = [Category(0, "a"), Category(1, "b")]
SSD = {
    "backbone": "lcnet_035",
    "strides": [16, 32],
    "channels": [8, 8],
    "aspect_ratios": [[2.0], [2.0]],
}
INNER = {
    "freeze": "none",
    "strides": [8, 16],
    "fpn_channels": 8,
    "anchor_sizes": [[16], [32]],
    "representation_size": 16,
    "rpn_pre_nms_top_n_train": 20,
    "rpn_post_nms_top_n_test": 10,
    "box_batch_size_per_image": 8,
}
GRAPH = {"hidden_dim": 8, "embed_dim": 4}


def begin(options, folder, resumed_from=None):
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text("model: {}")
    torch.manual_seed(0)
    return start_detector(options, CLASSES, folder, resumed_from=resumed_from, say=print)


def noted(folder) -> dict:
    path = folder / "pretrained_config.json"
    return json.loads(path.read_text())


def rebuilt_from(architecture: str, settings: dict, class_names: list):
    """The detector that a run with these settings has."""
    model = {"architecture": architecture} | settings
    return rebuild_detector({"model": model}, class_names)


def assert_same_weights(module, state) -> None:
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, state[name]), name


@pytest.fixture
def source(tmp_path):
    """A trained SSD, in the folder `final`."""
    ssd = build_detector(
        "ssdlite",
        class_names=CLASSES,
        nms_threshold=0.3,
        score_threshold=0.2,
        norm="group",
        **SSD,
    )
    ssd.save_final(tmp_path / "final", CATEGORIES)
    return ssd


def test_a_setting_is_the_given_one_else_that_of_the_source_else_the_published_one(tmp_path, source):
    final = str(tmp_path / "final")
    options = SsdliteOptions(pretrained=final, score_threshold=0.01)  # given, though published
    options.candidates_per_class = 17  # set afterwards, as notebooks do
    detector = begin(options, tmp_path / "run")
    assert detector.nms_threshold == 0.3
    assert detector.score_threshold == 0.01
    assert detector.candidates_per_class == 17
    assert detector.multibox.negatives_per_positive == 3
    assert_same_weights(source, detector.state_dict())
    note = noted(tmp_path / "run")
    assert set(note["given"]) == {"pretrained", "score_threshold", "candidates_per_class"}
    assert note["source"] == final
    assert note["options"]["norm"] == "group"
    assert note["options"]["nms_threshold"] == 0.3
    assert "architecture" not in note["options"]

    resolved = detector.resolved_options()
    given = {name: resolved[name] for name in note["given"]}
    rebuilt = rebuilt_from("ssdlite", note["options"] | given, CLASSES)
    assert rebuilt.resolved_options() == resolved

    (tmp_path / "final").rename(tmp_path / "gone")  # a resumed run neither needs nor loads its source
    checkpoint = tmp_path / "run" / "checkpoints" / "step_000001"
    resumed = begin(options, tmp_path / "again", checkpoint)
    assert resumed.resolved_options() == resolved
    assert noted(tmp_path / "again") == note


def test_what_a_parser_was_not_given_is_the_source_s(tmp_path, source):
    """A parser hands over every setting; `only_given` says which of them the user wrote."""
    options = SsdliteOptions(pretrained=str(tmp_path / "final"), iou_threshold=0.5)
    values = {name: value for name, value in vars(options).items() if not name.startswith("_")}
    parsed = SsdliteOptions(**values)
    parsed = parsed.only_given({"pretrained", "iou_threshold"})
    detector = begin(parsed, tmp_path / "run")
    assert detector.nms_threshold == 0.3
    assert detector.strides == (16, 32)
    assert noted(tmp_path / "run")["given"] == ["pretrained", "iou_threshold"]


def test_a_final_folder_of_another_version_is_said_to_be_that(tmp_path, source):
    final = tmp_path / "final"
    detector, *_ = load_detector_folder(final)
    assert detector.resolved_options() == source.resolved_options()
    file = final / "config.json"
    model = json.loads(file.read_text())["model"]
    model["box_nms_thresh"] = model.pop("nms_threshold")
    old = {"model": model, "processor_size": None}
    file.write_text(json.dumps(old))
    with pytest.raises(BadInput, match=r"was written by another version .* \(format 1; this one reads \d+.*again"):
        load_detector_folder(final)


# ---- scene graphs ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shapes") / "data"
    make_shapes(folder, train_images=2, val_images=1, image_size=64)
    return open_dataset(folder / "annotations" / "train.json", cache_dir=folder.parent / "cache")


def start_graphs(table, folder, said=None, **options):
    return start_scene_graph(
        SceneGraphOptions(**options),
        table,
        folder,
        checkpoint=None,
        say=print if said is None else said.append,
    )


def test_scene_graphs_start_from_a_detector_and_their_folder_builds_them_again(table, tmp_path):
    torch.manual_seed(3)
    inner = build_detector(
        "faster_rcnn",
        class_names=table.class_names,
        backbone="test_resnet",
        nms_threshold=0.2,
        **INNER,
    )
    final = str(tmp_path / "final")
    inner.save_final(tmp_path / "final", table.categories)
    said = []
    model = start_graphs(table, tmp_path, said, detector=final, head="imp", **GRAPH)
    assert model.detector.roi_heads.nms_thresh == 0.2
    assert model.nms_threshold == 0.5
    assert_same_weights(inner, model.detector.state_dict())
    for parameter in model.detector.parameters():
        assert not parameter.requires_grad
    assert model.relation_counts.sum() > 0
    assert "weights of the detector" in said[-1]
    assert (tmp_path / "detector_weights.txt").exists()
    note = noted(tmp_path)
    assert note["given"] == ["head", "detector", "hidden_dim", "embed_dim"]
    assert note["options"]["predicates"] == list(table.predicates)
    given = {"head": "imp", "detector": final} | GRAPH
    rebuilt = rebuilt_from("scene_graph", note["options"] | given, table.class_names)
    assert rebuilt.resolved_options() == model.resolved_options()
    rebuilt.load_state_dict(model.state_dict())

    resolved = model.resolved_options()
    settings = {key: resolved[key] for key in asdict(SceneGraphOptions())}
    again = start_graphs(table, tmp_path, **settings)
    assert again.resolved_options() == resolved, "a run by the config.yaml of another one"
    graphs = str(tmp_path / "graphs")
    model.save_final(tmp_path / "graphs", table.categories)
    tuned = start_graphs(table, tmp_path, pretrained=graphs, label_smoothing=0.1)
    assert tuned.label_smoothing == 0.1
    assert tuned.relation_losses == model.relation_losses
    assert_same_weights(model, tuned.state_dict())
    other_inner = INNER | {"fpn_channels": 4}
    refused = {
        "backbone: leave them out": {"detector": final, "backbone": "resnet18d"},
        "fpn_channels: leave them out": {"detector": final, "detector_options": other_inner},
        "is a scene graph; expected a detector": {"detector": graphs},
    }
    for words, options in refused.items():
        with pytest.raises(BadInput, match=words):
            start_graphs(table, tmp_path, **options)


def test_graphs_are_not_trained_on_data_without_a_relation(tmp_path):
    make_shapes(tmp_path, train_images=1, val_images=1, image_size=64)
    file = tmp_path / "annotations" / "train.json"
    content = json.loads(file.read_text())
    content["rel_annotations"] = []
    file.write_text(json.dumps(content))
    table = open_dataset(file, image_dir=tmp_path / "train", cache_dir=tmp_path / "cache")
    with pytest.raises(BadInput, match="not a single relation between the boxes of its 1 images; give data with"):
        start_graphs(table, tmp_path, **GRAPH)


# ---- how it is measured ----------------------------------------------------------------------------------------------


def test_a_detector_is_measured_by_what_it_finds(table):
    of_boxes = build_detector("ssdlite", class_names=table.class_names, **SSD)
    evaluator = make_evaluator(of_boxes, table, "toolkit")
    assert isinstance(evaluator, CocoEvaluator)
    of_boxes.make_evaluator = lambda table, backend: ("own", backend)
    assert make_evaluator(of_boxes, table, "toolkit") == ("own", "toolkit")


def test_scene_graphs_of_several_sets_need_the_same_predicates(table, tmp_path):
    graphs = build_detector(
        "scene_graph",
        class_names=table.class_names,
        predicates=list(table.predicates),
        backbone="test_resnet",
        detector_options=INNER,
        **GRAPH,
    )
    evaluator = make_evaluator(graphs, table, "toolkit", protocol="strict")
    assert isinstance(evaluator, SceneGraphEvaluator)
    assert evaluator.protocol == "strict"
    sets = (JoinedSet("a", (0, 1)), JoinedSet("b", (0, 1)))
    several = replace(table, name="a + b", sets=sets)
    evaluator = make_evaluator(graphs, several, "toolkit")
    assert isinstance(evaluator, SceneGraphEvaluator)
    different = replace(several, predicates=())
    said = r"a \+ b are several data sets that do not all list the same predicates.*RUN --split"
    with pytest.raises(BadInput, match=f"data.val: {said}"):
        make_evaluator(graphs, different, "toolkit")
    with pytest.raises(BadInput, match=f"data.path, data.train: {said}"):
        start_graphs(different, tmp_path)


# ---- settings of every detector --------------------------------------------------------------------------------------

LIGHT = {
    "dataclasses",
    "typing",
    "collections.abc",
    "toolkit.models",
    "toolkit.base.number_types",
}
OPTIONS_FILES = sorted(ROOT.glob("toolkit/**/options.py"))


@pytest.mark.parametrize("path", OPTIONS_FILES, ids=lambda path: path.parent.name)
def test_settings_are_read_without_anything_heavy(path):
    """The command line imports them."""
    for node in ast.walk(ast.parse(path.read_text())):
        assert not isinstance(node, ast.Import)
        if isinstance(node, ast.ImportFrom):
            assert node.module in LIGHT


def documented_fields(cls: ast.ClassDef):
    """Each field with the text below it, "" without one."""
    for field, following in zip(cls.body, [*cls.body[1:], None], strict=True):
        if not isinstance(field, ast.AnnAssign):
            continue
        if "ClassVar" in ast.unparse(field.annotation):
            continue
        has_text = isinstance(following, ast.Expr)
        yield field.target.id, following.value.value if has_text else ""


@pytest.mark.parametrize("path", OPTIONS_FILES, ids=lambda path: path.parent.name)
def test_every_setting_says_in_a_sentence_what_it_is(path):
    explained = {"architecture"}  # by the base; a class that only changes a default says nothing again
    tree = ast.parse(path.read_text())
    for cls in ast.walk(tree):
        if not isinstance(cls, ast.ClassDef):
            continue
        for name, text in documented_fields(cls):
            if text or name not in explained:
                assert str(text).rstrip().endswith("."), f"{cls.name}.{name}"
            explained.add(name)


# Settings that no value stands for before the backbone, the data or the source of the weights is known.
DERIVED = {
    "pretrained",
    "mean",
    "std",
    "leaky_slope",
    "head_channels",
    "detector",
    "detector_options",
    "backbone",
    "freeze",
    "word_vectors",
    "norm_momentum",
    "size",
}


@pytest.mark.parametrize("architecture", DETECTORS)
def test_settings_have_their_real_values(architecture):
    values = asdict(options_class(architecture)())
    empty = {name for name, value in values.items() if value is None}
    assert empty <= DERIVED
    if architecture not in ("scene_graph", "egtr", "fasterrcnn_resnet50_fpn_v2"):
        assert not empty & {"backbone", "freeze"}
