"""DETR: what of its backbone is frozen, and learned position embeddings."""

import pytest
import torch
from small_detectors import batch_of, run, small, weighted

from toolkit.base.errors import BadInput


def copies_of_statistics(backbone) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in backbone.named_buffers() if "running" in name}


@pytest.mark.parametrize("freeze", ["paper", "norms", "none"])
def test_freezing_survives_train_mode_and_follows_the_paper(freeze):
    detector = small("detr", backbone="mobilenetv3_small_050", freeze=freeze).train()
    backbone = detector.model.model.backbone.model
    before = copies_of_statistics(backbone)
    run(detector, batch_of([1, 2]))
    after = copies_of_statistics(backbone)
    moved = [name for name in before if not torch.equal(after[name], before[name])]
    trained = [name for name, parameter in backbone.named_parameters() if parameter.requires_grad]
    stem_and_first_stage = [name for name in trained if name.startswith(("conv_stem", "blocks.0."))]  # up to stride 4
    assert bool(stem_and_first_stage) == (freeze != "paper")
    for stage in range(1, 6):
        assert [name for name in trained if name.startswith(f"blocks.{stage}.")]
    norms = [name for name, _ in backbone.named_parameters() if ".bn" in name]
    assert bool(norms) == bool(moved) == (freeze == "none")


def test_random_residual_branches_are_not_frozen_shut():
    """timm starts the last norm of a branch at 0, to be learned; frozen there, the branch would be dead for good."""
    frozen = small("detr", freeze="norms").model.model.backbone.model
    norms = [module for name, module in frozen.named_modules() if name.endswith("bn2")]
    assert norms
    assert all(norm.weight.all() for norm in norms)
    learning = small("detr").model.model.backbone.model.layer2[0].bn2
    assert not learning.weight.any()
    assert learning.weight.requires_grad


@pytest.fixture
def learned():
    return small("detr", position_embedding="learned")


def test_learned_position_embeddings_learn_where_the_image_is(learned):
    table = learned.train().model.model.position_embedding
    assert len(table.row_embeddings.weight) == 50
    assert table.row_embeddings.weight.min() >= 0
    assert 0.4 < table.column_embeddings.weight.mean() < 0.6  # uniform from 0 to 1, as in the original
    before = table.row_embeddings.weight.detach().clone()
    losses, _ = run(learned, batch_of([2, 1]))
    weighted(learned, losses).backward()
    torch.optim.SGD(learned.parameters(), lr=0.1).step()
    moved = (table.row_embeddings.weight != before).any(1)
    two_rows_of_32_px = 2
    assert moved[:two_rows_of_32_px].all()
    assert not moved[two_rows_of_32_px:].any()


def test_learned_position_embeddings_reach_50_positions(learned):
    with pytest.raises(BadInput, match="model.position_embedding learned.*1664 px.*50 positions, sides of 1600"):
        learned(
            torch.zeros(
                1,
                3,
                32,
                1664,
                dtype=torch.uint8,
            ),
            torch.tensor([[32, 1664]]),
        )


def test_learned_position_embeddings_are_the_original_s(learned):
    table = learned.model.model.position_embedding
    column = table.column_embeddings.weight
    row = table.row_embeddings.weight
    height, width = 3, 5
    found = table(torch.Size([2, 1, height, width]), column.device, column.dtype)
    # facebookresearch/detr models/position_encoding.py: columns first
    wanted = torch.cat([column[:width].repeat(height, 1, 1), row[:height, None].repeat(1, width, 1)], dim=-1)
    torch.testing.assert_close(found, wanted.permute(2, 0, 1).repeat(2, 1, 1, 1))
