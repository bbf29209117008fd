"""Features of the union box of two objects: visual features of its content, and the positions of the two boxes."""

from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn
from torchvision.ops import roi_align

from toolkit.base.batch import image_of_each
from toolkit.base.box_ops import moved_ends
from toolkit.detectors.scene_graphs.box_features import rectangle_masks, union_boxes
from toolkit.detectors.scene_graphs.heads.layers import fc

PAIRS_PER_CHUNK = 4096  # in evaluation, which has all pairs: about 1 GB of 256 channels


class RectangleFeatures(nn.Module):
    """Features of the positions of two boxes: the boxes are drawn as masks of the whole image, and these are convolved
    to the size of pooled features."""

    def __init__(self, channels: int, resolution: int = 7):
        super().__init__()
        self.mask_size = 4 * resolution - 1
        self.conv = nn.Sequential(
            nn.Conv2d(2, channels // 2, 7, stride=2, padding=3),
            nn.ReLU(),
            nn.BatchNorm2d(channels // 2, momentum=0.01),
            nn.MaxPool2d(3, stride=2, padding=1),
            nn.Conv2d(channels // 2, channels, 3, padding=1),
            nn.ReLU(),
            nn.BatchNorm2d(channels, momentum=0.01),
        )

    def forward(self, subjects_xyxy: Tensor, objects_xyxy: Tensor, sizes_hw: Tensor) -> Tensor:
        """Convert boxes of R pairs, subjects (R, 4) and objects (R, 4), in images of the sizes (R, 2), height and
        width, to features (R, channels, resolution, resolution). Without pairs (R = 0), the batch norms are not
        updated."""
        both = torch.stack([subjects_xyxy, objects_xyxy], 1)  # (R, 2, 4)
        masks = rectangle_masks(both, sizes_hw[:, None], self.mask_size)
        if not len(masks):
            resolution = (self.mask_size + 1) // 4
            nothing = masks.new_zeros(0, self.conv[4].out_channels, resolution, resolution)
            return nothing + 0 * self.conv[0].bias.sum()  # with a gradient
        return self.conv(masks)


class AllLevelsPool(nn.Module):
    """RoI pooling of each box from every level of the feature pyramid. A 3 x 3 convolution joins the levels.

    The levels of a frozen detector cannot adapt to each other, but this convolution, which is trained, can.
    """

    def __init__(self, pool: nn.Module, channels: int):
        """Build the pool with the levels of a detector's `box_pool`, and with its convention on whether boxes end at or
        behind their last pixel. channels: of the feature maps."""
        super().__init__()
        self.last_pixel = float(hasattr(pool, "pool"))  # `WholePixelPool`: boxes end at it, not behind it
        align = getattr(pool, "pool", pool)
        self.names = tuple(align.featmap_names)
        self.scales = tuple(align.scales)
        self.size = align.output_size
        self.ratio = align.sampling_ratio
        self.reduce = nn.Conv2d(channels * len(self.names), channels, 3, padding=1)
        nn.init.kaiming_normal_(self.reduce.weight, mode="fan_out", nonlinearity="relu")
        nn.init.zeros_(self.reduce.bias)

    def forward(self, maps: Mapping[str, Tensor], boxes: Sequence[Tensor], image_shapes: Sequence, *on_host) -> Tensor:
        """Return (R, channels, resolution, resolution) for the R boxes of all images; the arguments are those of
        `LevelPool.forward`."""
        ends = [moved_ends(image_boxes, -self.last_pixel) for image_boxes in boxes]
        pooled = []
        for name, scale in zip(self.names, self.scales, strict=True):
            pooled.append(roi_align(maps[name], ends, self.size, scale, self.ratio))
        return self.reduce(torch.cat(pooled, 1)).relu()


class UnionFeatures(nn.Module):
    """Features of pairs: pooled features of the union box plus `RectangleFeatures`, passed through a box head.

    pool: torchvision's MultiScaleRoIAlign or a module with its arguments. head: converts (R, channels, resolution,
    resolution) to (R, U). separate_spatial: if U instead of 0, the rectangles are passed through two layers of their
    own instead of the box head. last_pixel: number of pixels that the pool's boxes end behind the boxes given.
    """

    def __init__(
        self,
        pool: nn.Module,
        head: nn.Module,
        channels: int,
        resolution: int = 7,
        separate_spatial: int = 0,
        last_pixel: float = 0.0,
    ):
        super().__init__()
        self.pool = pool
        self.head = head
        self.rectangles = RectangleFeatures(channels, resolution)
        self.last_pixel = last_pixel
        self.spatial = None
        if separate_spatial:
            self.spatial = nn.Sequential(
                fc(channels * resolution**2, separate_spatial // 2),
                nn.ReLU(),
                fc(separate_spatial // 2, separate_spatial),
                nn.ReLU(),
            )

    def forward(
        self,
        feature_maps: Mapping[str, Tensor],
        boxes_xyxy: Tensor,
        pairs: Tensor,
        num_pairs: Sequence[int],
        sizes_hw: Tensor,
        images_hw: Sequence[tuple[int, int]] | None = None,
        on_host: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return features (R, U) of the R pairs, U numbers each, and, with `separate_spatial`, such features of the
        positions of their boxes, else None.

        In evaluation, `PAIRS_PER_CHUNK` pairs are computed at once, so that an image with hundreds of objects fits the
        memory.

        Args:
            feature_maps: by name.
            boxes_xyxy: (N, 4) of all images.
            pairs: (R, 2) rows of these boxes.
            num_pairs: number of pairs of each image.
            sizes_hw: (B, 2) height and width of the images without padding, on any device.
            images_hw: the same on the host, if known there.
            on_host: boxes and pairs on the host, if known there.
        """
        shapes = images_hw or list(map(tuple, sizes_hw.tolist()))
        about = (feature_maps, boxes_xyxy, sizes_hw, shapes)
        if self.training or len(pairs) <= PAIRS_PER_CHUNK:
            return self._of_pairs(*about, pairs, list(num_pairs), on_host)
        features = []
        spatial = []
        for first in range(0, len(pairs), PAIRS_PER_CHUNK):
            last = first + PAIRS_PER_CHUNK
            # Of images of 3 and 4 pairs, the chunk from 2 to 6 has 1 and 3.
            counts = []
            for end, count in zip(accumulate(num_pairs), num_pairs, strict=True):
                counts.append(max(0, min(end, last) - max(end - count, first)))
            chunk_on_host = on_host and (on_host[0], on_host[1][first:last])
            of_pairs, places = self._of_pairs(*about, pairs[first:last], counts, chunk_on_host)
            features.append(of_pairs)
            spatial.append(places)
        return torch.cat(features), None if self.spatial is None else torch.cat(spatial)

    def _of_pairs(
        self,
        feature_maps: Mapping[str, Tensor],
        boxes_xyxy: Tensor,
        sizes_hw: Tensor,
        shapes: Sequence,
        pairs: Tensor,
        num_pairs: list[int],
        on_host: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, Tensor | None]:
        subjects = boxes_xyxy[pairs[:, 0]]
        objects = boxes_xyxy[pairs[:, 1]]
        image = image_of_each(num_pairs, boxes_xyxy.device)
        pair_sizes = sizes_hw.to(boxes_xyxy)[image]
        rectangles = self.rectangles(subjects, objects, pair_sizes)
        unions = [union_boxes(subjects, objects)]
        if on_host is not None:
            boxes, rows = on_host
            unions.append(union_boxes(boxes[rows[:, 0]], boxes[rows[:, 1]]))
        unions = [moved_ends(of_pairs, self.last_pixel) for of_pairs in unions]
        by_image, *by_image_on_host = [list(of_pairs.split(num_pairs)) for of_pairs in unions]
        pooled = self.pool(dict(feature_maps), by_image, shapes, *by_image_on_host)
        if self.spatial is not None:
            return self.head(pooled), self.spatial(rectangles.flatten(1))
        return self.head(pooled + rectangles.to(pooled)), None
