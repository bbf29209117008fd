"""Low-rank adapters on vision transformers: what learns and what stays, and that nobody needs them afterwards."""

import copy
import sys
from types import SimpleNamespace

import pytest
import torch
from small_detectors import CATEGORIES, CLASSES, batch_of, build, hub_config, run, small, weighted
from timm.models.eva import Eva

from toolkit.errors import BadInput
from toolkit.models.detector import kept_maps
from toolkit.models.weights.pretrained import open_pretrained
from toolkit.runs.settings_file import changes
from toolkit.scene_graphs.options import SceneGraphOptions
from toolkit.scene_graphs.start import start_scene_graph
from toolkit.step.adapters import add_adapters, base_name, without_adapters
from toolkit.step.optim import layer_depths, parameter_groups

PYRAMID = {"backbone": "test_vit", "class_names": CLASSES}
DETECTORS = {
    "yolov3": lambda: build("yolov3", head_channels=[8, 8, 8], **PYRAMID),
    "ssd": lambda: build("ssd", strides=[8, 16], channels=[16] * 2, aspect_ratios=[[2]] * 2, **PYRAMID),
    "rf_detr": lambda: small("rf_detr"),
    "yolos": lambda: small("yolos"),
    "deimv2": lambda: build("deimv2", source_config=hub_config("dinov3")),
}
VITS = ("backbone.vit.", "model.model.backbone.backbone.", "model.vit.", "model.model.conv_encoder.backbone.")


def learned(name: str):
    """A detector with adapters after two updates, and its state before them."""
    detector, batch = DETECTORS[name](), batch_of([2, 1], (64, 64))
    add_adapters(detector, 4, 8.0)
    before = copy.deepcopy(detector.state_dict())
    optimizer = torch.optim.AdamW(parameter_groups(detector.train(), lr=1e-2, weight_decay=0.1))
    for _ in range(2):  # A has no gradient before B has moved
        optimizer.zero_grad()
        weighted(detector, run(detector, batch)[0]).backward()
        optimizer.step()
    return detector, before


@torch.no_grad()
def seen(detector) -> list[torch.Tensor]:
    """Everything in the feature maps, and in the outputs, of a batch."""
    batch = batch_of([2, 1], (64, 64))
    with kept_maps(detector.map_taps()) as maps:
        outputs = detector.eval()(batch.images, batch.sizes)
    return [torch.cat([v.flatten().float() for v in each.values() if torch.is_tensor(v)]) for each in (maps, outputs)]


@pytest.mark.parametrize("name", list(DETECTORS))
def test_adapters_learn_below_a_detector_and_the_transformer_stays(name, tmp_path):
    plain = DETECTORS[name]()
    detector, before = learned(name)
    after, detector.options["lora_alpha"] = detector.state_dict(), 8.0
    moved = {key for key in after if not after[key].equal(before[key])}
    adapters = {key for key in after if ".lora_" in key}
    inside = {key for key in after if key.startswith(VITS)}
    of_attention = {key for key in inside if base_name(key) != key and key.endswith("base_layer.weight")}
    assert adapters and adapters <= moved and len(adapters) == 2 * len(of_attention)
    assert moved & inside - adapters == {key for key in inside if key.endswith("detection_tokens")}
    assert moved - inside, "the head learns"

    ended = without_adapters(detector)
    assert list(ended.state_dict()) == list(plain.state_dict()) and without_adapters(ended) is ended
    maps, found = seen(detector)
    maps_merged, found_merged = seen(ended)
    torch.testing.assert_close(found_merged, found, rtol=1e-4, atol=1e-4)
    plain.load_state_dict({base_name(key): value for key, value in after.items() if key not in adapters})
    rounding, effect = ((other - maps).abs().mean().item() for other in (maps_merged, seen(plain)[0]))
    assert effect > 100 * rounding, "what was learned makes a difference"
    ended.save_final(tmp_path, CATEGORIES)
    saved, state = open_pretrained(str(tmp_path)).tensors, ended.state_dict()
    assert saved and all(saved[key].equal(state[key]) for key in saved.keys() & state.keys())
    assert {key for key in state if key.startswith(VITS)} <= saved.keys()


def test_layer_decay_gives_an_adapter_the_factor_of_its_layer():
    plain = DETECTORS["yolov3"]()
    depths = layer_depths(plain)
    detector = DETECTORS["yolov3"]()
    add_adapters(detector, 4, 8.0)
    with_adapters = layer_depths(detector)
    assert len(with_adapters) > len(depths) and {depths[base_name(name)] - depth for name, depth in
                                                 with_adapters.items()} == {0}  # fmt: skip


def test_adapters_of_fused_projections_are_not_passed_by():
    """timm's EVA takes the weight of `qkv` alone, unless it adds the bias itself."""
    vit = Eva(img_size=32, patch_size=16, embed_dim=32, depth=1, num_heads=2, num_classes=0)
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    before = vit.eval()(pixels)
    add_adapters(model := torch.nn.Sequential(vit), 2, 4.0)
    torch.testing.assert_close(model(pixels), before)
    found = model(pixels)
    (found * torch.arange(found.numel()).view_as(found)).sum().backward()  # the plain sum of a layer norm is constant
    gradients = {name: p.grad for name, p in model.named_parameters() if "lora_B" in name}
    assert len(gradients) == 2 and all(grad is not None and grad.any() for grad in gradients.values())


def test_what_cannot_have_adapters_is_refused_in_a_sentence(tmp_path, monkeypatch):
    detector = build("ssdlite", backbone="lcnet_035")
    with pytest.raises(BadInput, match="^model.lora_rank 8: ssdlite on lcnet_035 has no vision transformer"):
        add_adapters(detector, 8, 16.0)
    with pytest.raises(BadInput, match="model.lora_rank is -1, model.lora_alpha 16.0; expected"):
        add_adapters(detector, -1, 16.0)
    assert all(p.requires_grad for p in detector.parameters())
    with pytest.raises(BadInput, match="^model.lora_rank 8: scene graphs have no adapters; train the detector with"):
        options, table = SceneGraphOptions(lora_rank=8), SimpleNamespace(sets=())
        start_scene_graph(options, table, tmp_path, checkpoint=None, say=print)
    monkeypatch.setitem(sys.modules, "peft", None)
    add_adapters(detector, 0, 16.0)
    with pytest.raises(BadInput, match=r"^adapters \(model.lora_rank\) need peft, .*detection-toolkit\[adapters\]"):
        add_adapters(DETECTORS["yolov3"](), 8, 16.0)


def test_a_resumed_run_keeps_its_adapters():
    earlier = {"model": {"lora_rank": 8, "lora_alpha": 16.0}}
    changed = changes(earlier, {"model": {"lora_rank": 0, "lora_alpha": 8.0}}, keep_schedule=True)
    assert [change.verdict for change in changed] == ["refused", "refused"]
