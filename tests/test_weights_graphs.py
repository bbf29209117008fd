"""Published scene graphs: what Scene-Graph-Benchmark's own program predicts.   Run: pytest tests/test_weights_graphs.py

`tests/assets/weights/sgb_*.npz` were computed with its modules (on a CPU, torchvision's operators for its own), as
`published.py` says, with small heads and pictures.
"""

import json

import pytest
import torch
from PIL import Image
from published import pixels, published_rcnn

from toolkit.base.errors import BadInput
from toolkit.data.formats import open_dataset
from toolkit.detectors.scene_graphs.options import SceneGraphOptions
from toolkit.detectors.scene_graphs.start import start_scene_graph
from toolkit.detectors.scene_graphs.weights_scene_graph_benchmark import SCENE_GRAPH_BENCHMARK
from toolkit.models import build_detector
from toolkit.models.weights.pretrained import load_pretrained, open_pretrained
from toolkit.tools.predict.open import open_predictor

HEADS = ("motifs", "imp", "vctree", "transformer", "causal_motifs", "causal_vctree", "causal_vtranse")
BOXES = torch.tensor([[10.0, 12, 70, 90], [40, 20, 120, 100], [5, 60, 60, 120], [90, 10, 180, 110], [100, 50, 150, 90]])
CLASSES, PREDICATES = ["cup", "table", "chair", "lamp"], ["on", "under", "near"]


def weights(name):
    state, expected = published_rcnn(name)
    for key in state:
        if "decoderLSTM.embed_" in key:  # the last of two names of one tensor
            alone = key.replace("decoderLSTM.embed_out_layer", "out").replace("decoderLSTM.embed_layer", "obj_embed")
            state[alone] = state[key]
    return state, expected


def saved(name, tmp_path):
    state, expected = weights(name)
    torch.save({"model": state, "iteration": 28000}, tmp_path / "model_0028000.pth")
    return open_pretrained(str(tmp_path / "model_0028000.pth")), expected, state


@pytest.mark.parametrize("head", HEADS)
def test_scene_graphs_of_the_benchmark_predict_what_its_program_does(head, tmp_path):
    source, expected, state = saved(f"sgb_{head}", tmp_path)
    assert source.architecture == "scene_graph" and source.size == {"shortest_edge": 600, "longest_edge": 1000}
    options = source.options | {"detections_per_image": 12}
    if head == "transformer":
        options["head_options"] = options["head_options"] | {"heads": 2}
    if head == "causal_vtranse":
        options["head_options"] = options["head_options"] | {"effect": "TDE"}
    for mode in ("sgdet", "sgcls", "predcls"):
        model = build_detector("scene_graph", class_names=source.class_names, **options | {"mode": mode}).eval()
        loaded = load_pretrained(model, source, source.class_names)
        assert set(loaded.new) <= {"relation_counts", "candidate_counts", "seen_triplets", "predicate_weights"}
        target = {"boxes": BOXES, "labels": torch.tensor([0, 1, 2, 3, 1]), "iscrowd": torch.zeros(5)}
        target |= {"relations": torch.zeros(0, 3, dtype=torch.int64), "image_id": 1}
        images, sizes = pixels(1, 3, 128, 192), torch.tensor([[128, 192]])
        with torch.no_grad():
            outputs = model(images, sizes, None if mode == "sgdet" else [target])
            found = model.postprocess(outputs, sizes, sizes, top_k=1000)[0]
        theirs = {key: torch.from_numpy(expected[f"{mode}_{key}"]) for key in ("boxes", "labels", "scores", "pairs")}
        assert_same(found, theirs, torch.from_numpy(expected[f"{mode}_predicates"])[:, 1:])


def assert_same(found, theirs, predicates):
    boxes = theirs["boxes"]
    nearest = (found["boxes"][:, None] - boxes).abs().amax(-1).argmin(1)
    assert sorted(nearest.tolist()) == list(range(len(boxes)))
    torch.testing.assert_close(found["boxes"], boxes[nearest], rtol=0, atol=0.02)
    torch.testing.assert_close(found["scores"], theirs["scores"][nearest], rtol=1e-4, atol=1e-5)
    assert found["labels"].equal(theirs["labels"][nearest] - 1)
    row_of = {tuple(pair): row for row, pair in enumerate(theirs["pairs"].tolist())}
    rows = [row_of[tuple(nearest[pair].tolist())] for pair in found["pairs"]]
    assert sorted(rows) == list(range(len(row_of)))
    torch.testing.assert_close(found["predicate_scores"], predicates[rows], rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """One image with two relations, named as `.names` and `.predicates` files name them."""
    folder = tmp_path_factory.mktemp("data")
    Image.new("RGB", (192, 128)).save(folder / "a.jpg")
    boxes = torch.cat([BOXES[:, :2], BOXES[:, 2:] - BOXES[:, :2]], 1).tolist()
    document = {
        "images": [{"id": 1, "file_name": "a.jpg", "width": 192, "height": 128}],
        "categories": [{"id": i, "name": name} for i, name in enumerate(CLASSES)],
        "annotations": [{"id": i, "image_id": 1, "category_id": i % 4, "bbox": box} for i, box in enumerate(boxes)],
        "attribute_categories": [{"id": 1, "name": "red"}],
        "rel_categories": [{"id": i, "name": name} for i, name in enumerate(PREDICATES)],
        "rel_annotations": [{"image_id": 1, "subject_id": i, "object_id": i + 1, "predicate_id": i} for i in (0, 1)],
    }
    (folder / "graphs.json").write_text(json.dumps(document))
    return open_dataset(folder / "graphs.json", image_dir=folder, cache_dir=folder / "cache")


def test_training_goes_on_from_a_published_scene_graph(table, tmp_path):
    source, _, _ = saved("sgb_motifs", tmp_path)
    file = tmp_path / "model_0028000.pth"
    file.with_suffix(".names").write_text("\n".join(CLASSES))
    said = []

    def start(**options):
        return start_scene_graph(SceneGraphOptions(**options), table, tmp_path, checkpoint=None, say=said.append)

    with pytest.raises(BadInput, match=r"knows the predicates \['predicate 0', .*\], the data \['on'"):
        start(pretrained=str(file))
    file.with_suffix(".predicates").write_text("\n".join(PREDICATES))
    model = start(pretrained=str(file), mode="predcls", freeze="detector")
    assert model.mode == "predcls" and model.relation_counts.sum() == 2 and model.seen_triplets.sum() == 2
    learnt = source.tensors["head.frequency.table.weight"]
    assert torch.equal(model.head.frequency.table.weight, learnt), "not counted anew: it was trained"
    assert model.attributes == ("red",) and "new     attribute_predictor" in said[0]
    assert "mode sgdet, unless --model.mode" in said[0] and "unused  roi_heads.relation.predictor" in said[0]
    trained = {name for name, value in model.named_parameters() if value.requires_grad}
    assert "head.frequency.table.weight" in trained and not any(name.startswith("detector.") for name in trained)
    below = start(detector=str(file), hidden_dim=8, embed_dim=4)
    assert torch.equal(below.detector.rpn.head.cls_logits.weight, model.detector.rpn.head.cls_logits.weight)


def test_a_published_scene_graph_is_opened_as_it_is(tmp_path):
    saved("sgb_causal_motifs", tmp_path)
    predictor = open_predictor(tmp_path / "model_0028000.pth", settings={"head_options.effect": "TDE"})
    found = predictor(torch.zeros(3, 64, 64, dtype=torch.uint8), score_threshold=0.0)
    assert len(predictor.class_names) == 4 and found["pairs"].shape[1] == 2 and len(found["predicates"]) > 0
    of_boxes = open_predictor(tmp_path / "model_0028000.pth", settings={"mode": "sgcls"})
    assert predictor.given is None and of_boxes.given == "boxes", "the file does not say its mode"
    with pytest.raises(BadInput, match="model.mode is 'sgd'"):
        open_predictor(tmp_path / "model_0028000.pth", settings={"mode": "sgd"})


@pytest.mark.parametrize("change, words", [
    (("predictor.rel_compress", "predictor.other"), "unknown relation head.*--model.detector"),
    (("relation.box_feature_extractor.fc6.weight", "relation.att_feature_extractor.fc6.weight"), "attributes"),
])  # fmt: skip
def test_what_is_not_known_is_said(change, words):
    state = {key.replace(*change): value for key, value in weights("sgb_motifs")[0].items()}
    with pytest.raises(BadInput, match=words):
        SCENE_GRAPH_BENCHMARK.described(state, "model_0028000.pth")
