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
CATEGORIES = [Category(i, name) for i, name in enumerate(CLASSES)]
SSD = {"backbone": "lcnet_035", "strides": [16, 32], "channels": [8, 8], "aspect_ratios": [[2.0], [2.0]]}
STAGES = {"rpn_pre_nms_top_n_train": 20, "rpn_post_nms_top_n_test": 10, "box_batch_size_per_image": 8}
INNER = {"freeze": "none", "strides": [8, 16], "fpn_channels": 8, "anchor_sizes": [[16], [32]],
         "representation_size": 16, **STAGES}  # fmt: skip
GRAPH = {"hidden_dim": 8, "embed_dim": 4}


def begin(options, folder, resumed_from=None, **known):
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text("model: {}")
    torch.manual_seed(0)
    return start_detector(options, CLASSES, folder, resumed_from=resumed_from, say=print, known=known or None)


def noted(folder):
    return json.loads((folder / "pretrained_config.json").read_text())


def test_a_setting_is_the_given_one_else_that_of_the_source_else_the_published_one(tmp_path):
    source = build_detector("ssdlite", class_names=CLASSES, **SSD, nms_threshold=0.3, score_threshold=0.2, norm="group")
    source.save_final(tmp_path / "final", CATEGORIES)
    options = SsdliteOptions(pretrained=str(tmp_path / "final"), score_threshold=0.01)  # given, though published
    options.candidates_per_class = 17  # set afterwards, as notebooks do
    detector = begin(options, tmp_path / "run")
    assert (detector.nms_threshold, detector.score_threshold, detector.candidates_per_class) == (0.3, 0.01, 17)
    assert detector.multibox.negatives_per_positive == 3
    assert all(torch.equal(v, detector.state_dict()[k]) for k, v in source.state_dict().items())
    note = noted(tmp_path / "run")
    assert set(note["given"]) == {"pretrained", "score_threshold", "candidates_per_class"}
    assert note["source"] == str(tmp_path / "final") and note["options"]["norm"] == "group"
    assert note["options"]["nms_threshold"] == 0.3 and "architecture" not in note["options"]

    only = {name: detector.resolved_options()[name] for name in note["given"]}
    rebuilt = rebuild_detector({"model": {"architecture": "ssdlite", **note["options"], **only}}, CLASSES)
    assert rebuilt.resolved_options() == detector.resolved_options()

    (tmp_path / "final").rename(tmp_path / "gone")  # a resumed run neither needs nor loads its source
    resumed = begin(options, tmp_path / "again", tmp_path / "run" / "checkpoints" / "step_000001")
    assert resumed.resolved_options() == detector.resolved_options() and noted(tmp_path / "again") == {
        **note, "source": note["source"]}  # fmt: skip


def test_what_a_parser_was_not_given_is_the_source_s(tmp_path):
    """A parser hands over every setting; `only_given` says which of them the user wrote."""
    source = build_detector("ssdlite", class_names=CLASSES, **SSD, nms_threshold=0.3)
    source.save_final(tmp_path / "final", CATEGORIES)
    options = SsdliteOptions(pretrained=str(tmp_path / "final"), iou_threshold=0.5)
    values = {name: value for name, value in vars(options).items() if not name.startswith("_")}
    detector = begin(SsdliteOptions(**values).only_given({"pretrained", "iou_threshold"}), tmp_path / "run")
    assert detector.nms_threshold == 0.3 and detector.strides == (16, 32)
    assert noted(tmp_path / "run")["given"] == ["pretrained", "iou_threshold"]


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shapes") / "data"
    make_shapes(folder, train_images=4, val_images=1, image_size=64)
    return open_dataset(folder / "annotations" / "train.json", cache_dir=folder.parent / "cache")


def test_scene_graphs_start_from_a_detector_and_their_folder_builds_them_again(table, tmp_path):
    names = table.class_names
    torch.manual_seed(3)
    inner = build_detector("faster_rcnn", class_names=names, backbone="test_resnet", **INNER, nms_threshold=0.2)
    inner.save_final(tmp_path / "final", table.categories)
    said = []

    def start(**options):
        return start_scene_graph(SceneGraphOptions(**options), table, tmp_path, checkpoint=None, say=said.append)

    options = SceneGraphOptions(detector=str(tmp_path / "final"), head="imp", **GRAPH)
    model = start(detector=options.detector, head="imp", **GRAPH)
    assert model.detector.roi_heads.nms_thresh == 0.2 and model.nms_threshold == 0.5
    assert all(torch.equal(v, model.detector.state_dict()[k]) for k, v in inner.state_dict().items())
    assert not any(p.requires_grad for p in model.detector.parameters()) and model.relation_counts.sum() > 0
    assert "weights of the detector" in said[-1] and (tmp_path / "detector_weights.txt").exists()
    note = noted(tmp_path)
    assert note["given"] == ["head", "detector", "hidden_dim", "embed_dim"]
    assert note["options"]["predicates"] == list(table.predicates)
    given = {name: getattr(options, name) for name in note["given"]}
    rebuilt = rebuild_detector({"model": {"architecture": "scene_graph", **note["options"], **given}}, names)
    assert rebuilt.resolved_options() == model.resolved_options()
    rebuilt.load_state_dict(model.state_dict())

    resolved = model.resolved_options()
    again = start(**{key: resolved[key] for key in vars(options) if key != "_given"})
    assert again.resolved_options() == resolved, "a run by the config.yaml of another one"
    for wrong in ({"backbone": "resnet18d"}, {"detector_options": INNER | {"fpn_channels": 4}}):
        with pytest.raises(BadInput, match="backbone: leave them out|fpn_channels: leave them out"):
            start(detector=str(tmp_path / "final"), **wrong)
    model.save_final(tmp_path / "graphs", table.categories)
    with pytest.raises(BadInput, match="is a scene graph; expected a detector"):
        start(detector=str(tmp_path / "graphs"))
    tuned = start(pretrained=str(tmp_path / "graphs"), label_smoothing=0.1)
    assert tuned.label_smoothing == 0.1 and tuned.relation_losses == model.relation_losses
    assert all(torch.equal(v, tuned.state_dict()[k]) for k, v in model.state_dict().items())


def test_a_detector_is_measured_by_what_it_finds(table, tmp_path):
    of_boxes = build_detector("ssdlite", class_names=table.class_names, **SSD)
    assert isinstance(make_evaluator(of_boxes, table, "toolkit"), CocoEvaluator)
    of_boxes.make_evaluator = lambda table, backend: ("own", backend)
    assert make_evaluator(of_boxes, table, "toolkit") == ("own", "toolkit")
    graphs = build_detector("scene_graph", class_names=table.class_names, predicates=list(table.predicates),
                            backbone="test_resnet", detector_options=INNER, **GRAPH)  # fmt: skip
    evaluator = make_evaluator(graphs, table, "toolkit", protocol="strict")
    assert isinstance(evaluator, SceneGraphEvaluator) and evaluator.protocol == "strict"
    several = replace(table, name="a + b", sets=(JoinedSet("a", (0, 1)), JoinedSet("b", (0, 1))))
    assert isinstance(make_evaluator(graphs, several, "toolkit"), SceneGraphEvaluator)
    several = replace(several, predicates=())  # they list different ones
    said = r"a \+ b are several data sets that do not all list the same predicates.*RUN --split"
    with pytest.raises(BadInput, match=f"data.val: {said}"):
        make_evaluator(graphs, several, "toolkit")
    with pytest.raises(BadInput, match=f"data.path, data.train: {said}"):
        start_scene_graph(SceneGraphOptions(), several, tmp_path, checkpoint=None, say=print)


def test_a_final_folder_of_another_version_is_said_to_be_that(tmp_path):
    detector = build_detector("faster_rcnn", class_names=CLASSES, **INNER, backbone="test_resnet")
    detector.save_final(tmp_path, CATEGORIES)
    assert load_detector_folder(tmp_path)[0].resolved_options() == detector.resolved_options()
    written = json.loads((tmp_path / "config.json").read_text())
    old = written["model"] | {"box_nms_thresh": written["model"].pop("nms_threshold")}
    (tmp_path / "config.json").write_text(json.dumps({"model": old, "processor_size": None}))
    with pytest.raises(BadInput, match=r"was written by another version .* \(format 1; this one reads \d+.*again"):
        load_detector_folder(tmp_path)


OPTIONS_FILES = sorted(ROOT.glob("toolkit/**/options.py"))


@pytest.mark.parametrize("path", OPTIONS_FILES, ids=lambda path: path.parent.name)
def test_settings_are_read_without_anything_heavy(path):
    """The command line imports them, and every one says in a sentence what it is."""
    tree = ast.parse(path.read_text())
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported <= {"dataclasses", "typing", "collections.abc", "toolkit.models", "toolkit.base.number_types"}
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Import)]
    explained = {"architecture"}  # by the base; a class that only changes a default says nothing again
    for cls in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        for field, following in zip(cls.body, [*cls.body[1:], None], strict=True):
            if isinstance(field, ast.AnnAssign) and "ClassVar" not in ast.unparse(field.annotation):
                text = following.value.value if isinstance(following, ast.Expr) else ""
                if text or field.target.id not in explained:
                    assert str(text).rstrip().endswith("."), f"{cls.name}.{field.target.id} has no sentence"
                explained.add(field.target.id)


# Settings that no value stands for before the backbone, the data or the source of the weights is known.
DERIVED = {
    "pretrained", "mean", "std", "leaky_slope", "head_channels", "detector", "detector_options", "backbone", "freeze",
    "word_vectors", "norm_momentum", "size",
}  # fmt: skip


@pytest.mark.parametrize("architecture", DETECTORS)
def test_settings_have_their_real_values(architecture):
    options = options_class(architecture)()
    empty = {name for name, value in asdict(options).items() if value is None}
    assert empty <= DERIVED
    if architecture not in ("scene_graph", "egtr", "fasterrcnn_resnet50_fpn_v2"):
        assert not empty & {"backbone", "freeze"}


def test_graphs_are_not_trained_on_data_without_a_relation(tmp_path):
    make_shapes(tmp_path, train_images=1, val_images=1, image_size=64)
    file = tmp_path / "annotations" / "train.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rel_annotations": []}))
    table = open_dataset(file, image_dir=tmp_path / "train", cache_dir=tmp_path / "cache")
    with pytest.raises(BadInput, match="not a single relation between the boxes of its 1 images; give data with"):
        start_scene_graph(SceneGraphOptions(**GRAPH), table, tmp_path, checkpoint=None, say=print)
