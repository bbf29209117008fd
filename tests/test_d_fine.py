"""RT-DETR-v2, D-FINE and DEIMv2: criterion against transformers', configs of the hub, final folders, two ranks.

pytest tests/test_d_fine.py
"""

import copy
import multiprocessing
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from PIL import Image
from processes import run_on_ranks
from torch.nn.parallel import DistributedDataParallel
from transformers import (
    AutoModelForObjectDetection,
    Deimv2Config,
    DFineConfig,
    DINOv3ViTConfig,
    HGNetV2Config,
    RTDetrResNetConfig,
    RTDetrV2Config,
    pipeline,
)
from transformers.loss.loss_d_fine import DFineForObjectDetectionLoss
from transformers.loss.loss_deimv2 import Deimv2Loss

from toolkit.data.batches import collate
from toolkit.errors import BadInput
from toolkit.models import build_detector, options_class
from toolkit.models.detr.rt_detr import _transformers_targets, without_crowd
from toolkit.models.start import start_detector
from toolkit.step.losses import LossWeights, window_denominators
from toolkit.step.optim import parameter_groups

# The ranks are forked from a server that has imported transformers once for both.
multiprocessing.set_forkserver_preload(["torch", "toolkit.models.detr.d_fine", "test_d_fine"])
CLASSES = ["circle", "square", "star"]
SMALL = {"d_model": 32, "heads": 2, "decoder_layers": 3, "ffn_dim": 32, "num_queries": 12, "num_denoising": 8,
         "hidden_expansion": 0.5}  # fmt: skip
FAMILY = ("rt_detr_v2", "d_fine", "deimv2")


@dataclass
class Category:
    id: int
    name: str


def small(architecture: str, **options):
    torch.manual_seed(0)
    given = {"backbone": "mobilenetv3_small_050", "freeze": "none", **SMALL, **options}
    return build_detector(architecture, class_names=CLASSES, **given)


def stirred(detector):
    """With heads that no longer start at zero, so that every layer and every side of a box is different."""
    torch.manual_seed(1)
    decoder = detector.model.model.decoder
    quality = [lqe.reg_conf for lqe in getattr(decoder, "lqe_layers", ())]
    for head in (detector.model.model.enc_bbox_head, *decoder.bbox_embed, *quality):
        torch.nn.init.normal_(head.layers[-1].weight, std=0.3)
    for head in decoder.class_embed:
        torch.nn.init.normal_(head.weight, std=0.3)
    return detector


def batch_of(counts, hw=(64, 64), crowd=0, seed=0):
    """Images with `counts` boxes each, the first `crowd` of which are crowd regions."""
    generator = torch.Generator().manual_seed(seed)
    items = []
    for i, count in enumerate(counts):
        corners = torch.rand(count, 2, 2, generator=generator).sort(dim=1).values
        boxes = (corners * torch.tensor([hw[1], hw[0]])).flatten(1)
        target = {
            "image_id": i, "boxes": boxes, "labels": torch.randint(len(CLASSES), (count,), generator=generator),
            "area": (boxes[:, 2:] - boxes[:, :2]).prod(1), "iscrowd": torch.arange(count).lt(crowd).long(),
            "size": torch.tensor(hw), "orig_size": torch.tensor(hw),
        }  # fmt: skip
        items.append((torch.randint(256, (3, *hw), generator=generator, dtype=torch.uint8), target))
    return collate(items)


def run(detector, batch, denominators=None):
    outputs = detector(batch.images, batch.sizes, batch.targets)
    return detector.criterion(outputs, batch.targets, denominators or detector.denominators(batch.targets))[0]


# --- criterion --------------------------------------------------------------------------------------------------------


def their_outputs(layers, noisy):
    """What the criterion of transformers takes, each output with its own distribution, as in the original."""
    boxes, references = layers["boxes"].clamp(0, 1), layers["references"]
    last = layers["corners"].shape[1]

    def output(position, part):
        plain = {"logits": layers["logits"][:, position, part], "pred_boxes": boxes[:, position, part]}
        if position == 0:
            return plain
        return plain | {
            "pred_corners": layers["corners"][:, position - 1, part], "ref_points": references[:, part],
            "teacher_corners": layers["corners"][:, -1, part], "teacher_logits": layers["logits"][:, -1, part],
        }  # fmt: skip

    queries, order = slice(noisy, None), [*range(1, last), 0]
    encoder = {"logits": layers["encoder_logits"], "pred_boxes": layers["encoder_boxes"].clamp(0, 1)}
    main = output(last, queries) | {"auxiliary_outputs": [*(output(i, queries) for i in order), encoder]}
    if layers["denoising"] is not None:
        main["dn_auxiliary_outputs"] = [output(i, slice(noisy)) for i in [*range(1, last + 1), 0]]
        main["denoising_meta_values"] = layers["denoising"]
    return main


def renamed(theirs, num_layers):
    """Their names of the last outputs, which are numbered on from the layers, by ours."""
    endings = {f"_aux_{num_layers - 1}": "_pre", f"_aux_{num_layers}": "_enc", f"_dn_{num_layers}": "_dn_pre"}
    for ending, ours in endings.items():
        theirs = {name.replace(ending, ours): value for name, value in theirs.items()}
    return theirs


@pytest.mark.parametrize("union", [True, False])
@pytest.mark.parametrize("architecture", ["d_fine", "deimv2"])
def test_losses_equal_those_of_transformers(architecture, union, monkeypatch):
    # Which of two objects wins a tie in the union is undefined there, beyond 16 pairs: here the first one does.
    monkeypatch.setattr(torch, "argsort", partial(torch.argsort, stable=True))
    detector = stirred(small(architecture, union_matching=union)).train()
    batch = batch_of([2, 0, 14], crowd=1)  # 14: more than queries, and than denoising queries
    outputs = detector(batch.images, batch.sizes, batch.targets)
    ours, _ = detector.criterion(outputs, batch.targets, detector.denominators(batch.targets))
    layers = outputs["layers"]
    criterion = Deimv2Loss(Deimv2Config(
        num_labels=len(CLASSES), use_dense_one_to_one=union, focal_loss_gamma=1.5 if architecture == "deimv2" else 2.0
    ))  # fmt: skip
    if architecture == "d_fine":
        criterion.losses = ["vfl", "boxes", "local"]
    criterion.weight_dict = dict.fromkeys(("loss_vfl", "loss_mal", "loss_bbox", "loss_giou", "loss_fgl", "loss_ddf"), 1)
    labels = _transformers_targets(list(map(without_crowd, batch.targets)))
    theirs = renamed(criterion(their_outputs(layers, layers["denoising"]["dn_num_split"][0]), labels), 3)
    # The last layer is its own teacher: 0, not announced here.
    assert {name for name in theirs if name not in ours} == {"loss_ddf", "loss_ddf_dn_2"}
    assert set(ours) == set(detector.loss_names) <= set(theirs)
    for name, value in ours.items():
        assert value > 0
        torch.testing.assert_close(value, theirs[name], rtol=1e-5, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")
    inputs = [layers[key] for key in ("logits", "boxes", "corners", "encoder_logits", "encoder_boxes")]
    wanted = torch.autograd.grad(sum(theirs.values()), inputs, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(sum(ours.values()), inputs), wanted, rtol=1e-4, atol=1e-6)


def test_transformers_own_loss_hands_the_distributions_to_the_wrong_layers():
    """What does not depend on them agrees; the last layer has none there, and the last but one no losses at all."""
    detector = stirred(small("d_fine", union_matching=False)).train()
    batch = batch_of([2, 3])
    layers = detector(batch.images, batch.sizes, batch.targets)["layers"]
    ours = detector.set_loss(layers, batch.targets, detector.denominators(batch.targets))
    config = copy.deepcopy(detector.model.config)
    config.weight_loss_bbox = config.weight_loss_giou = config.weight_loss_fgl = config.weight_loss_ddf = 1.0
    references = layers["references"][:, None].expand(-1, 3, -1, -1)
    labels = _transformers_targets(batch.targets)
    _, theirs, _ = DFineForObjectDetectionLoss(
        layers["logits"][:, -1], labels, "cpu", layers["boxes"][:, -1], config, layers["logits"], layers["boxes"],
        enc_topk_logits=layers["encoder_logits"], enc_topk_bboxes=layers["encoder_boxes"],
        denoising_meta_values=layers["denoising"], predicted_corners=layers["corners"],
        initial_reference_points=references,
    )  # fmt: skip
    same = {"": "", "_pre": "_aux_0", "_aux_0": "_aux_1", "_enc": "_aux_2", "_dn_pre": "_dn_0", "_dn_0": "_dn_1"}
    for here, there in same.items():
        for name in ("loss_vfl", "loss_bbox", "loss_giou"):
            torch.testing.assert_close(ours[f"{name}{here}"], theirs[f"{name}{there}"], rtol=1e-5, atol=1e-6)
    assert "loss_fgl" not in theirs and not any(torch.isclose(v, ours["loss_vfl_aux_1"]) for v in theirs.values())
    assert not torch.isclose(ours["loss_fgl_aux_0"], theirs["loss_fgl_aux_0"], rtol=1e-4)


@pytest.fixture(scope="module", params=FAMILY)
def detector(request):
    return small(request.param)


@pytest.mark.parametrize(("counts", "crowd"), [([2, 0, 3], 1), ([1], 0), ([0, 0], 0), ([2], 2)])
def test_names_are_announced_and_every_trained_parameter_gets_a_gradient(detector, counts, crowd):
    batch = batch_of(counts, crowd=crowd)
    denominators = window_denominators([detector.denominators(batch.targets)], "cpu")[0]
    losses = run(detector.train(), batch, denominators)
    missing = set(detector.loss_names) - set(losses)
    if any(count > crowd for count in counts):
        assert not missing
    else:  # no denoising queries, and nothing to be found by the others
        assert missing == {name for name in detector.loss_names if "_dn_" in name}
        assert losses["loss_bbox"] == losses["loss_giou_enc"] == 0
    assert set(losses) <= set(detector.loss_names)
    total = LossWeights(detector.loss_names, {}, detector.default_weights)(losses, 0).total
    total.backward()
    gradients = {n: p.grad for n, p in detector.named_parameters() if p.requires_grad}
    without = [n for n, gradient in gradients.items() if gradient is None]
    assert total.isfinite() and all(g.isfinite().all() for g in gradients.values() if g is not None)
    assert without == ([] if not missing else ["model.model.denoising_class_embed.weight"])
    detector.zero_grad()


@pytest.mark.parametrize("architecture", ["d_fine", "deimv2"])
def test_evaluation_has_the_losses_of_every_layer_and_the_same_predictions(architecture):
    detector = stirred(small(architecture)).eval()
    batch = batch_of([2, 3])
    with torch.no_grad():
        losses = run(detector, batch)
        alone = detector(batch.images, batch.sizes)
        beside = detector(batch.images, batch.sizes, batch.targets)
    assert set(losses) == {name for name in detector.loss_names if "_dn_" not in name}
    assert torch.equal(alone["logits"], beside["logits"]) and torch.equal(alone["boxes"], beside["boxes"])


@pytest.mark.parametrize("architecture", ["d_fine", "deimv2"])
def test_non_finite_predictions_give_a_non_finite_loss_and_no_exception(architecture):
    detector = small(architecture).train()
    batch = batch_of([2, 1])
    layers = detector(batch.images, batch.sizes, batch.targets)["layers"]
    for key in ("logits", "boxes", "corners"):
        poisoned = layers | {key: layers[key].detach().clone().index_fill_(1, torch.tensor([1]), float("nan"))}
        losses = detector.set_loss(poisoned, batch.targets, detector.denominators(batch.targets))
        assert not sum(losses.values()).isfinite() and losses["loss_giou_enc"].isfinite()


def gradient(detector, batch, parts, denominators):
    """Of the losses of all boxes of `batch`, in `parts`, seen by queries that stay the same."""
    detector.zero_grad()
    weights = LossWeights(detector.loss_names, {}, detector.default_weights)
    for part in parts:
        outputs = detector(batch.images[part], batch.sizes[part], batch.targets[part])
        losses, _ = detector.criterion(outputs, batch.targets[part], denominators)
        weights(losses, 0).total.backward()
    return torch.cat([p.grad.flatten() for p in detector.parameters() if p.grad is not None])


def accumulation_error(architecture, **options):
    detector = stirred(small(architecture, num_denoising=0, **options)).double()
    for module in detector.modules():  # batch statistics are those of a micro-batch, of course
        if isinstance(module, torch.nn.BatchNorm2d):
            module.eval()
    batch = batch_of([2, 0, 7, 1])
    shared = detector.denominators(batch.targets)
    whole = gradient(detector, batch, [slice(0, 4)], shared)
    return ((gradient(detector, batch, [slice(0, 2), slice(2, 4)], shared) - whole).norm() / whole.norm()).item()


def test_accumulated_gradients_equal_those_of_the_big_batch_as_far_as_docs_differences_says():
    """Exact for what is divided by boxes; how many queries the union has is known after the forward only."""
    assert accumulation_error("rt_detr_v2") < 1e-6
    error = accumulation_error("d_fine", union_matching=False)
    union_error = accumulation_error("d_fine")
    assert error < 0.05 and union_error < 0.2


# --- configs of the hub -----------------------------------------------------------------------------------------------

HGNET = {"stem_channels": [3, 8, 8], "stage_in_channels": [8, 8, 8, 16], "stage_mid_channels": [8, 8, 8, 8],
         "stage_out_channels": [8, 8, 16, 16], "stage_num_blocks": [1, 1, 1, 1], "stage_numb_of_layers": [1, 1, 1, 1],
         "hidden_sizes": [8, 8, 16, 16], "embedding_size": 8, "depths": [1, 1, 1, 1],
         "stage_light_block": [False] * 4}  # fmt: skip
TINY = {"d_model": 16, "encoder_hidden_dim": 16, "decoder_in_channels": [16] * 3, "encoder_attention_heads": 2,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "num_queries": 10,
        "decoder_layers": 2, "num_denoising": 6, "num_labels": 7, "hidden_expansion": 0.5}  # fmt: skip


def hub_config(architecture: str) -> dict:
    """As a folder of the hub has it: another number of classes, a backbone of transformers' own."""
    if architecture == "rt_detr_v2":
        resnet = RTDetrResNetConfig(embedding_size=8, hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1],
                                    layer_type="basic", out_indices=[2, 3, 4])  # fmt: skip
        return RTDetrV2Config(backbone_config=resnet, **TINY).to_dict()
    if architecture == "dinov3":
        vit = DINOv3ViTConfig(hidden_size=24, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2,
                              patch_size=16, out_indices=[1, 2, 3], reshape_hidden_states=True)  # fmt: skip
        return Deimv2Config(backbone_config=vit, spatial_tuning_adapter_inplanes=4, depth_mult=0.34, **TINY).to_dict()
    config = {"d_fine": DFineConfig, "deimv2": Deimv2Config}[architecture]
    backbone = HGNetV2Config(out_indices=[2, 3, 4], **HGNET)
    return config(backbone_config=backbone, depth_mult=0.34, max_num_bins=16, reg_scale=8.0, **TINY).to_dict()


@pytest.mark.parametrize("architecture", [*FAMILY, "dinov3"])
def test_a_config_of_the_hub_builds_its_model_with_our_classes(architecture):
    source = hub_config(architecture)
    name = "deimv2" if architecture == "dinov3" else architecture
    detector = build_detector(name, class_names=CLASSES, source_config=source).train()
    original = AutoModelForObjectDetection.from_config(
        type(detector).config_class.from_dict(source | {"id2label": dict(enumerate(CLASSES))})
    )
    losses = run(detector, batch_of([2, 0, 1]))
    assert set(losses) == set(detector.loss_names) and sum(losses.values()).isfinite()
    detector.model.load_state_dict(original.state_dict())
    detector.eval(), original.eval()
    batch = batch_of([0, 0])
    with torch.no_grad():
        ours = detector(batch.images, batch.sizes)
        mean, std = (torch.tensor(values)[:, None, None] for values in (detector.mean, detector.std))
        theirs = original(pixel_values=(batch.images / 255 - mean) / std)
    assert ours["logits"].shape == (2, 10, len(CLASSES))
    torch.testing.assert_close(ours["logits"], theirs.logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours["boxes"], theirs.pred_boxes, rtol=1e-4, atol=1e-5)
    assert source == hub_config(architecture)  # not touched


@pytest.mark.parametrize("architecture", FAMILY)
def test_given_options_override_a_config_of_the_hub(architecture):
    source = hub_config(architecture)
    options = {"num_queries": 7, "num_denoising": 0, "decoder_layers": 3, "d_model": 32, "freeze": "none"}
    detector = build_detector(architecture, class_names=["one"], source_config=source, **options)
    config = detector.model.config
    assert (config.num_queries, config.decoder_layers, config.d_model, config.encoder_hidden_dim) == (7, 3, 32, 32)
    assert config.encoder_ffn_dim == 16 and config.id2label == {0: "one"}
    assert detector.mean == (0, 0, 0) and not any("_dn_" in name for name in detector.loss_names)
    learning = [n for n, _ in detector._backbone().named_parameters() if "norm" in n]
    assert learning
    frozen = build_detector(architecture, class_names=["one"], source_config=source, freeze="norms")
    assert not [n for n, _ in frozen._backbone().named_parameters() if "norm" in n]


def test_a_config_with_a_timm_backbone_builds_the_same_model_again():
    detector = small("deimv2", depth_mult=0.34)
    source = detector.model.config.to_dict() | {"auxiliary_loss": False}  # as save_final leaves it
    again = build_detector("deimv2", class_names=CLASSES, source_config=source)
    assert again.state_dict().keys() == detector.state_dict().keys() and again.loss_names == detector.loss_names
    again.load_state_dict(detector.state_dict())
    groups = parameter_groups(again, lr=1.0, weight_decay=0.0, backbone_lr=0.1)
    in_backbone = sum(len(group["params"]) for group in groups if group["name"] == "backbone")
    assert in_backbone == len(list(again._backbone().parameters()))
    other = build_detector("deimv2", class_names=CLASSES, source_config=source, backbone="resnet10t")
    assert other.model.config.backbone_config.backbone == "resnet10t"


@pytest.mark.parametrize(
    ("architecture", "options", "words"),
    [
        ("d_fine", {"backbone": "resnet18d", "freeze": "paper"}, ["model.backbone", "hgnet_v2", "'paper'"]),
        ("rt_detr_v2", {"pretrained_backbone": True}, ["model.pretrained_backbone", "rt_detr_resnet"]),
        ("deimv2", {"freeze": "stem"}, ["model.freeze", "'stem'", "paper, norms, none"]),
        ("d_fine", {"source_config": hub_config("deimv2")}, ["d_fine", "'deimv2'"]),
    ],
)
def test_options_that_a_config_of_the_hub_does_not_allow_are_named(architecture, options, words):
    with pytest.raises(BadInput) as error:
        build_detector(architecture, class_names=CLASSES, **{"source_config": hub_config(architecture), **options})
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("architecture", FAMILY)
def test_a_single_decoder_layer_is_refused(architecture):
    """transformers ties the heads of the other layers to the first, and fails where there are none."""
    with pytest.raises(BadInput, match=r"model\.decoder_layers: 1 is too few.*use 2"):
        small(architecture, decoder_layers=1)


@pytest.mark.parametrize("architecture", FAMILY)
def test_fine_tuning_from_a_folder_of_the_hub_keeps_what_its_classes_know(tmp_path, architecture):
    names = ["star", "dog", "circle"]
    source = hub_config(architecture) | {"id2label": dict(enumerate(names))}
    config = type(small(architecture)).config_class.from_dict(source)
    original = AutoModelForObjectDetection.from_config(config).eval()
    original.save_pretrained(tmp_path / "hub")
    (tmp_path / "run").mkdir()
    settings = {"architecture": architecture, "pretrained": str(tmp_path / "hub"), "freeze": "none"}
    options = options_class(settings["architecture"])(**settings)
    detector = start_detector(options, CLASSES, tmp_path / "run", resumed_from=None, say=print).eval()
    batch = batch_of([0])
    with torch.no_grad():  # as many queries as positions: another class cannot choose other ones
        detector.model.config.num_queries = original.config.num_queries = 21
        ours, theirs = detector(batch.images, batch.sizes)["logits"], original(batch.images / 255).logits
    for name in ("star", "circle"):
        values = [
            logits[0, :, classes.index(name)].sort().values for logits, classes in ((ours, CLASSES), (theirs, names))
        ]
        torch.testing.assert_close(*values, rtol=1e-3, atol=1e-4)
    losses = run(detector.train(), batch_of([2, 1], (128, 128)))
    assert sum(losses.values()).isfinite()


# --- weights and the final folder -------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", FAMILY)
def test_random_weights_let_the_image_through_and_start_from_the_prior(architecture):
    detector = small(architecture).train()
    batch = batch_of([1, 1, 2])
    layers = detector(batch.images, batch.sizes, batch.targets)["layers"]
    logits = layers["encoder_logits"]
    assert logits.sigmoid().mean() < 0.05  # nearly everything is background
    assert logits.std(dim=(0, 1)).mean() > 0.05  # and it depends on where one looks
    for module in detector.model.model.decoder.layers[0].modules():
        if isinstance(module, torch.nn.Linear) and module.weight.any():  # gates and offsets start at 0
            assert module.weight.std() > 0.05  # transformers: 0.01


@pytest.mark.parametrize("architecture", FAMILY)
def test_the_final_folder_loads_as_a_pipeline_and_gives_the_same_boxes(tmp_path, architecture):
    detector = stirred(small(architecture)).train()
    run(detector, batch_of([1, 2], (64, 96)))  # norms move away from where they started
    detector.eval().save_final(
        tmp_path, [Category(7 * i, n) for i, n in enumerate(CLASSES)], {"height": 64, "width": 96}
    )
    assert detector.model.config.auxiliary_loss
    batch = batch_of([0], (64, 96))
    with torch.no_grad():
        outputs = detector(batch.images, batch.sizes)
    (ours,) = detector.postprocess(outputs, batch.sizes, batch.sizes, score_threshold=-1.0, top_k=12)
    image = Image.fromarray(batch.images[0].permute(1, 2, 0).numpy())
    assert AutoModelForObjectDetection.from_pretrained(tmp_path).config.auxiliary_loss is False
    found = pipeline("object-detection", model=str(tmp_path), threshold=0.0)(image)
    assert [entry["label"] for entry in found] == [CLASSES[label] for label in ours["labels"]]
    scores = torch.tensor([entry["score"] for entry in found])
    torch.testing.assert_close(scores, ours["scores"], rtol=0, atol=1e-4)
    boxes = torch.tensor([[entry["box"][k] for k in ("xmin", "ymin", "xmax", "ymax")] for entry in found])
    assert (boxes - ours["boxes"]).abs().max() < 1 + 1e-4  # a pipeline cuts pixels off to integers


# --- two ranks --------------------------------------------------------------------------------------------------------


def train_two_steps(architectures):
    """On a rank: two steps of each, rank 1 without boxes in the first one."""
    rank, results = torch.distributed.get_rank(), {}
    for architecture in architectures:
        detector = small(architecture).train()
        model = DistributedDataParallel(detector, find_unused_parameters=True)
        optimizer = torch.optim.SGD([p for p in detector.parameters() if p.requires_grad], lr=1e-3)
        weights = LossWeights(detector.loss_names, {}, detector.default_weights)
        totals = []
        for step in range(2):
            batch = batch_of([0, 0] if (rank, step) == (1, 0) else [2, 1], seed=10 * rank + step)
            denominators = window_denominators([detector.denominators(batch.targets)], "cpu")[0]
            outputs = model(batch.images, batch.sizes, batch.targets)
            weighted = weights(detector.criterion(outputs, batch.targets, denominators)[0], step)
            weighted.total.backward()
            optimizer.step(), optimizer.zero_grad()
            totals.append(weighted.total.detach())
        parameters = torch.cat([p.detach().flatten() for p in detector.parameters()])
        results[architecture] = (torch.stack(totals), weights.names, parameters, weighted.unknown)
    return results


def test_two_ranks_train_together_where_one_has_no_boxes():
    first, second = run_on_ranks(train_two_steps, 2, FAMILY)
    for architecture in FAMILY:
        totals, names, parameters, unknown = first[architecture]
        other_totals, other_names, other_parameters, _ = second[architecture]
        assert totals.isfinite().all() and other_totals.isfinite().all() and not torch.equal(totals, other_totals)
        assert names == other_names and not unknown
        assert torch.equal(parameters, other_parameters)
        torch.manual_seed(0)
        start = torch.cat([p.detach().flatten() for p in small(architecture).parameters()])
        assert not torch.equal(parameters, start)
