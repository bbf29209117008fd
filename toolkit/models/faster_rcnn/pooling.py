"""RoIAlign on the pyramid level that fits each box, with at most one host read; torchvision's reads once per level."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torchvision.ops import MultiScaleRoIAlign, roi_align

from toolkit.batch import image_of_each, send


class LevelPool(MultiScaleRoIAlign):
    """`MultiScaleRoIAlign` with the same numbers; its `scales` and `map_levels` must be set."""

    @classmethod
    def of(cls, pool: MultiScaleRoIAlign) -> "LevelPool":
        return cls(pool.featmap_names, pool.output_size, pool.sampling_ratio, canonical_scale=pool.canonical_scale,
                   canonical_level=pool.canonical_level)  # fmt: skip

    def forward(
        self,
        maps: Mapping[str, Tensor],
        boxes: Sequence[Tensor],
        image_shapes: Sequence[tuple[int, int]],
        known: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """(R, C, *output_size) of the boxes (R_i, 4) xyxy of each image, in the order of the images.

        known: the same boxes on the host, where they are there: then nobody waits.
        """
        levels = [maps[name] for name in self.featmap_names if name in maps]
        joined = _without_nan(torch.cat(list(boxes)))
        image = image_of_each([len(each) for each in boxes], joined.device)
        rois = torch.cat([image[:, None].to(joined), joined], dim=1)
        if len(levels) == 1:
            return self._pool(levels[0], rois, self.scales[0])
        level = self.map_levels([joined if known is None else _without_nan(torch.cat(list(known)))])
        order = level.argsort(stable=True)
        in_level = (level[:, None] == torch.arange(len(levels), device=level.device)).sum(0).tolist()  # the one wait
        order, back = (send(rows, joined.device) for rows in (order, order.argsort()))
        parts = zip(levels, rois[order].split(in_level), self.scales, strict=True)
        pooled = torch.cat([self._pool(one, own, scale).to(levels[0].dtype) for one, own, scale in parts])
        return pooled.index_select(0, back)

    def _pool(self, level: Tensor, rois: Tensor, scale: float) -> Tensor:
        return roi_align(level, rois, self.output_size, spatial_scale=scale, sampling_ratio=self.sampling_ratio)


def _without_nan(boxes: Tensor) -> Tensor:
    """A NaN is the guard's matter, elsewhere in the same step; here it would be on no level."""
    return boxes.masked_fill(boxes.isnan(), 0.0)
