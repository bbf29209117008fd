"""What every relation head promises: images by themselves, finite losses for any batch, and its own options."""

import pytest
import torch
from relation_data import batch_of, head_of, image_of

from toolkit.base.errors import BadInput
from toolkit.detectors.scene_graphs.heads import RELATION_HEADS
from toolkit.detectors.scene_graphs.heads.causal import CausalHead
from toolkit.detectors.scene_graphs.heads.imp import IMPHead
from toolkit.detectors.scene_graphs.heads.prototypes import PrototypeHead
from toolkit.detectors.scene_graphs.heads.react_pp import ReactPlusPlusHead
from toolkit.detectors.scene_graphs.heads.transformer import TransformerHead
from toolkit.detectors.scene_graphs.postprocess import rank_triplets
from toolkit.detectors.scene_graphs.relation_batch import head_losses, mean_or_zero


@pytest.mark.parametrize(
    ("name", "cls"),
    [
        ("imp", IMPHead),
        ("transformer", TransformerHead),
        ("vtranse", CausalHead),
        ("react", PrototypeHead),
        ("react_pp", ReactPlusPlusHead),
    ],
)
def test_a_name_builds_its_head(name, cls):
    assert isinstance(head_of(name, "predcls"), cls)


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
        total = sum(mean_or_zero(*pair).sum() for pair in values.values())
        assert total.isfinite()
        head.zero_grad()
        total.backward()
        for parameter in head.parameters():
            assert parameter.grad is None or parameter.grad.isfinite().all()
    for buffer in head.buffers():
        assert buffer.isfinite().all()


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
