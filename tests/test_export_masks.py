"""Exported detectors with masks: the files give the masks of the detector beside its boxes."""

import pytest
import torch
from test_export import CATEGORIES, CLASSES, SMALL, images_of, side_of

from toolkit.base.masks import areas, rles_of
from toolkit.models import build_detector
from toolkit.tools.export.check import check_against_pytorch, compare_outputs
from toolkit.tools.export.exported_files import open_exported
from toolkit.tools.export.write import export_detector, make_graph
from toolkit.tools.predict.open import open_predictor

MASKED = {
    "faster_rcnn": SMALL["faster_rcnn"] | {"mask_convs": 1, "mask_channels": 8},
    "rf_detr": SMALL["rf_detr"],
}
KIND = {"faster_rcnn": "box", "rf_detr": "image"}


@pytest.fixture(scope="module", params=MASKED)
def detector(request):
    torch.manual_seed(0)
    built = build_detector(request.param, class_names=CLASSES, masks=True, **MASKED[request.param])
    with torch.no_grad():
        for parameter in built.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    return built.eval()


@pytest.mark.slow
def test_files_give_the_masks_of_postprocess(detector, tmp_path):
    name = detector.options["architecture"]
    side = side_of(name)
    images, sizes = images_of(2, side, side), torch.tensor([[side, side]] * 2)
    size = {"height": side, "width": side}
    graph = make_graph(detector, 100)
    with torch.no_grad():
        boxes, _, _, masks = graph(images)
        expected = detector.postprocess(detector(images, sizes), sizes, sizes, 0.0, 100)
    for found, row_boxes, row_masks in zip(expected, boxes, masks, strict=True):
        count = len(found["boxes"])
        assert count > 3
        apart = (found["boxes"][:, None] - row_boxes).abs().amax(-1)
        same = apart.argmin(1)  # of scores that are equal to rounding, the order may be another one
        near = apart.amin(1) < 1e-3
        assert near.float().mean() >= 0.9
        torch.testing.assert_close(found["masks"][near], row_masks[same[near]], rtol=1e-3, atol=2e-3)
    written, graph = export_detector(
        detector, tmp_path, ("onnx", "torch"), categories=CATEGORIES, size=size, source="a", say=lambda text: None
    )
    for path in written.values():
        apart = check_against_pytorch(graph, path, images)
        assert apart.mask is not None and apart.mask < 1e-3 and "masks" in str(apart)
        about = open_exported(path, trusted=True)[1]
        assert (about.masks, about.outputs) == (KIND[name], ("boxes", "scores", "labels", "masks"))
    predictor = open_predictor(written["onnx"])
    assert predictor.masks
    (found,) = predictor.predict([images[0]], 0.0)
    assert len(found["masks"]) == len(found["boxes"]) > 3 and {mask.size_hw for mask in found["masks"]} == {
        (side, side)
    }
    pixels = detector.paste_masks(expected[0]["masks"], expected[0]["boxes"], (side, side))
    wanted = areas(rles_of(pixels), (side, side))
    assert sorted(areas(found["masks"], (side, side)))[-3:] == pytest.approx(sorted(wanted)[-3:], abs=3)
    with torch.no_grad():
        boxes, scores, labels, masks = graph(images)
    other = compare_outputs((boxes, scores, labels, masks), (boxes, scores, labels, 1 - masks), side)
    assert not other.is_rounding, "other masks are another detection"
