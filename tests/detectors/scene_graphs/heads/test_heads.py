"""What every relation head promises: images by themselves, finite losses for any batch, and its own options."""

from itertools import combinations

import pytest
import torch
from relation_data import batch_of, head_of, image_of

from toolkit.base.errors import BadInput
from toolkit.detectors.scene_graphs.heads import RELATION_HEADS
from toolkit.detectors.scene_graphs.heads.layers import AVERAGE_RATIO, RunningMean
from toolkit.detectors.scene_graphs.heads.vctree import drawn_columns
from toolkit.detectors.scene_graphs.postprocess import rank_triplets
from toolkit.detectors.scene_graphs.relation_batch import head_losses, mean
from toolkit.step.execution import describe_float32_layers, has_lstm_kernel


@pytest.mark.parametrize("mode", ["predcls", "sgcls", "sgdet"])
@pytest.mark.parametrize("name", RELATION_HEADS)
@torch.no_grad()
def test_images_do_not_see_each_other(name, mode):
    """Together with others, among them one without objects and one with a single object, or alone: the same."""
    head = head_of(name, mode).eval()
    batch = batch_of([3, 0, 5, 1, 5])
    together = head(batch)
    alone = [head(image_of(batch, i)) for i in range(5)]
    for key in ("object_logits", "relation_logits", "object_labels"):
        expected = torch.cat([getattr(output, key) for output in alone])
        torch.testing.assert_close(getattr(together, key), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", ["predcls", "sgdet"])
@pytest.mark.parametrize("name", RELATION_HEADS[1:])  # the frequency head has nothing to train
def test_every_batch_trains(name, mode, precision):
    """Finite losses under the announced names and gradients, for a batch without objects or pairs too."""
    head = head_of(name, mode).train()
    for num_objects in ([4, 2], [1], [0, 1, 3], [0, 0]):
        batch = batch_of(num_objects)
        with torch.autocast("cpu", dtype=precision, enabled=precision != torch.float32):
            output = head(batch)
        values = head_losses(output, batch)
        assert set(values) <= set(head.loss_names)
        assert not sum(num_objects) or set(values) == set(head.loss_names)
        total = sum(mean(*pair).sum() for pair in values.values())
        assert total.isfinite()
        head.zero_grad()
        total.backward()
        for parameter in head.parameters():
            assert parameter.grad is None or parameter.grad.isfinite().all()
    for buffer in head.buffers():
        assert buffer.isfinite().all()


def test_lstms_in_float32_are_told_of_where_they_are():
    """Those of Motifs (two), on a CPU that has no kernel of them for halves; other heads have matrix products."""
    motifs = head_of("motifs", "predcls")
    told = describe_float32_layers(motifs, "cpu", "bf16")
    assert ("the 2 of the detector go in float32" in told) == (not has_lstm_kernel("cpu", torch.bfloat16))
    assert not describe_float32_layers(motifs, "cpu", "no")
    assert not describe_float32_layers(motifs, "cuda", "bf16")
    assert not describe_float32_layers(head_of("vctree", "predcls"), "cpu", "bf16")


@torch.no_grad()
def test_effects_of_causal_differ():
    batch = batch_of([4, 3])
    outputs = []
    for effect in ("none", "TDE", "NIE", "TE"):
        head = head_of("causal", "sgcls", effect=effect)
        head.train()(batch)
        outputs.append(head.eval()(batch).relation_logits)
    for one, other in combinations(outputs, 2):
        assert (one - other).abs().max() > 1e-3


@torch.no_grad()
def test_effects_survive_half_precision():
    """The difference of two bfloat16 sums would have next to no digits left."""
    batch = batch_of([4, 3])
    head = head_of("causal", "predcls", effect="TDE").eval()
    expected = head(batch).relation_logits
    head.frequency.table.weight.add_(500.0)  # cancels exactly
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = head(batch).relation_logits
    assert half.dtype == torch.float32
    torch.testing.assert_close(
        half,
        expected,
        rtol=0.05,
        atol=0.05 * float(expected.abs().max()),
    )


@pytest.mark.parametrize("reads", [False, True])
def test_squat_reads_union_boxes_only_where_told(reads):
    head = head_of("squat", "predcls", use_union=reads).eval()
    batch = batch_of([4, 3])
    before = head(batch).relation_logits
    batch.union_features = batch.union_features + 1
    assert head.reads_union == reads
    assert torch.equal(before, head(batch).relation_logits) != reads


@pytest.mark.parametrize(
    ("name", "keeps"),
    [
        ("react", True),
        ("react_pp", True),
        ("squat", True),
        ("penet", False),
        ("frequency", False),
    ],
)
@torch.no_grad()
def test_some_heads_keep_the_labels_of_the_detector(name, keeps):
    """As their originals: overlapping boxes keep a class that late NMS gives to one of them alone."""
    batch = batch_of([4, 3])
    batch.found_labels = torch.tensor([2, 2, 1, 1, 3, 3, 3])
    batch.boxes_per_class = torch.tensor([[0.0, 0, 50, 50]]).expand(batch.boxes_per_class.shape)
    objects, _ = rank_triplets(head_of(name, "sgdet").eval()(batch), batch, given_boxes=False)
    assert torch.equal(objects["labels"], batch.found_labels - 1) == keeps
    if name == "react":
        probability = batch.logits.softmax(1).gather(1, batch.found_labels[:, None])[:, 0]
        torch.testing.assert_close(objects["scores"], probability)


@pytest.mark.parametrize(
    ("words", "head", "mode", "options"),
    [
        ("motif'", "motif", "predcls", {}),
        ("predcl'", "imp", "predcl", {}),
        ("dim is 10", "react_pp", "predcls", {"dim": 10}),
        ("(?s)dim is 12.*query_share is 0.*above 0 to 1", "squat", "predcls", {"dim": 12, "query_share": 0}),
        (
            "(?s)'lstm'.*'max'.*'TDA'",
            "causal",
            "predcls",
            {"context": "lstm", "fusion": "max", "effect": "TDA"},
        ),
    ],
)
def test_wrong_options_are_named(words, head, mode, options):
    with pytest.raises(BadInput, match=words):
        head_of(head, mode, **options)


def test_a_running_mean_moves_once_for_each_image_or_for_the_batch():
    rows = torch.randn(6, 3)
    of_images = RunningMean(3).train()
    of_batch = RunningMean(3).train()
    value = torch.zeros(3)
    for _ in range(2):
        of_images(rows, counts=[1, 0, 3, 2])
        of_batch(rows)
        for image in (rows[:1], rows[1:4], rows[4:]):  # the published loop
            value = value * (1 - AVERAGE_RATIO) + AVERAGE_RATIO * image.mean(0)
    torch.testing.assert_close(of_images.value, value)
    torch.testing.assert_close(of_batch.value, AVERAGE_RATIO * (2 - AVERAGE_RATIO) * rows.mean(0))


def test_columns_are_drawn_as_multinomial_draws_them():
    weights = torch.rand(
        500,
        9,
        generator=torch.Generator().manual_seed(0),
    )[:, 1:]
    torch.manual_seed(3)
    expected = weights.multinomial(1)[:, 0]
    torch.manual_seed(3)
    assert torch.equal(drawn_columns(weights, torch.empty(500, 8).exponential_()), expected)
