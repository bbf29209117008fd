"""LW-DETR: the blocks of its vision transformer that have windows, and those that give maps."""

import torch
from small_detectors import TINY_LW_DETR, build, small


def test_the_depth_decides_which_blocks_have_windows_and_give_maps():
    other = build("lw_detr", size="tiny", encoder_layers=4, num_queries=4)
    vit = other.model.config.backbone_config
    assert vit.window_block_indices == [0, 2]
    assert vit.out_indices == [1, 2, 3, 4]
    assert other.resolved_options()["size"] == "tiny"
    deeper = build("lw_detr", source_config=TINY_LW_DETR, encoder_layers=3).model.config.backbone_config
    assert (deeper.hidden_size, deeper.num_attention_heads, deeper.num_hidden_layers) == (24, 2, 3)
    assert deeper.window_block_indices == [0, 2]
    assert deeper.out_indices == [1, 2, 3]


def test_maps_are_the_outputs_of_the_blocks_counted_from_1():
    """The original counts them from 0."""
    vit = small("lw_detr").eval().model.model.backbone.backbone
    outputs = []
    for layer in vit.encoder.layer:
        layer.register_forward_hook(lambda _, __, output: outputs.append(output))
    with torch.no_grad():
        maps = vit(torch.rand(1, 3, 64, 128)).feature_maps
    assert len(maps) == len(outputs) == 2
    for of_image, of_windows in zip(maps, outputs, strict=True):
        windows = (
            of_image.unflatten(2, (4, 1))
            .unflatten(4, (4, 2))
            .permute(
                0,
                2,
                4,
                3,
                5,
                1,
            )
            .flatten(0, 2)
        )
        assert windows.flatten(1, 2).equal(of_windows)
