"""Features of union boxes: against numbers of the original, and in parts.

`relation_heads/union.npz` holds what the feature extractors of Scene-Graph-Benchmark (6f75881, MIT) give on small
random weights and inputs that it holds too.
"""

import pytest
import torch
from relation_data import batch_of, image_of
from scene_graph_data import arrays, load_original, part
from torchvision.models.detection.faster_rcnn import TwoMLPHead
from torchvision.ops import MultiScaleRoIAlign
from torchvision.ops.poolers import LevelMapper

from toolkit.detectors.faster_rcnn.build import WholePixelPool
from toolkit.detectors.scene_graphs.union import AllLevelsPool, UnionFeatures

NAMES = r"""
feature_extractor.pooler.reduce_channel.0 pool.reduce
feature_extractor head
spatial_fc spatial
rect_conv rectangles.conv
"""
CHANNELS = 2
WIDTH = 6


@pytest.fixture(scope="module")
def data():
    return arrays("union")


@pytest.fixture(scope="module")
def maps(data):
    return {str(level): data[f"map/{level}"] for level in range(4)}


def whole_pixel_pool() -> WholePixelPool:
    pool = MultiScaleRoIAlign(list("0123"), output_size=7, sampling_ratio=2)
    pool.scales = [1 / 4, 1 / 8, 1 / 16, 1 / 32]
    pool.map_levels = LevelMapper(2, 5)
    return WholePixelPool(pool)


def boxes_of(data):
    """Ours end behind their last pixel."""
    return data["boxes_last_pixel"] + torch.tensor([0.0, 0, 1, 1])


def close(found, expected):
    torch.testing.assert_close(found.detach(), expected, rtol=1e-4, atol=1e-5)


def test_features_of_boxes_are_those_of_the_original(data, maps):
    head = TwoMLPHead(CHANNELS * 49, WIDTH)
    load_original(head, part(data, "box/state/"), "")
    of_images = list(boxes_of(data).split(data["num_objects"].tolist()))
    close(
        head(
            whole_pixel_pool()(
                maps,
                of_images,
                data["sizes_hw"].tolist(),
            )
        ),
        data["box/features"],
    )


@pytest.mark.parametrize(("name", "separate"), [("all", 0), ("separate", WIDTH)])
def test_features_of_unions_are_those_of_the_original(data, maps, name, separate):
    pool = AllLevelsPool(whole_pixel_pool(), CHANNELS)
    head = TwoMLPHead(CHANNELS * 49, WIDTH)
    union = UnionFeatures(pool, head, CHANNELS, separate_spatial=separate).eval()
    load_original(union, part(data, f"{name}/state/"), NAMES)
    features, spatial = union(
        maps,
        boxes_of(data),
        data["pairs"],
        data["num_pairs"].tolist(),
        data["sizes_hw"],
    )
    close(features, data[f"{name}/features"])
    if separate:
        close(spatial, data["separate/spatial"])
    else:
        assert spatial is None
    assert pool(
        maps,
        [torch.zeros(0, 4)],
        [(128, 128)],
    ).shape == (0, CHANNELS, 7, 7), "no pairs"


def test_images_and_parts_of_them_do_not_see_each_other(monkeypatch):
    pool = MultiScaleRoIAlign(["0"], output_size=7, sampling_ratio=2)
    union = UnionFeatures(
        pool,
        torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(6 * 49, 10)),
        6,
    ).eval()
    maps = {"0": torch.randn(3, 6, 33, 33)}

    def features_of(maps, batch):
        return union(maps, batch.boxes_xyxy, batch.pairs, batch.num_pairs, batch.sizes_hw)[0]

    batch = batch_of([3, 0, 2])
    features = features_of(maps, batch)
    torch.testing.assert_close(features[6:], features_of({"0": maps["0"][2:]}, image_of(batch, 2)))
    seen = []
    pool.register_forward_hook(lambda _, __, pooled: seen.append(len(pooled)))
    monkeypatch.setattr("toolkit.detectors.scene_graphs.union.PAIRS_PER_CHUNK", 5)
    torch.testing.assert_close(features_of(maps, batch), features)
    assert seen == [5, 3], "the pairs of an image may be in two parts"


def test_a_batch_without_pairs_trains():
    pool = MultiScaleRoIAlign(["0"], output_size=7, sampling_ratio=2)
    union = UnionFeatures(
        pool,
        torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(6 * 49, 10)),
        6,
    )
    no_pairs = torch.zeros(0, 2, dtype=torch.int64)
    features, _ = union(
        {"0": torch.randn(1, 6, 9, 9)},
        torch.zeros(0, 4),
        no_pairs,
        [0],
        torch.tensor([[36, 36]]),
    )
    features.sum().backward()
    assert features.shape == (0, 10)
    assert union.rectangles.conv[2].running_mean.isfinite().all()
