"""Faster R-CNN with a feature pyramid (Ren et al. 2015; Lin et al. 2017), with masks Mask R-CNN (He et al. 2017), made
of torchvision's modules.

torchvision computes its losses inside the model, in autocast's precision and divided by the samples of one batch. Here
`forward` returns predictions and their targets; `criterion` computes the losses in float32, divided by denominators of
the whole optimizer step. `toolkit.detectors.faster_rcnn.build` makes the modules. Differences from torchvision and
seamseg are listed in docs/differences.md.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torchvision.models.detection import faster_rcnn as torchvision_models
from torchvision.models.detection.rpn import concat_box_prediction_layers
from torchvision.ops import MultiScaleRoIAlign
from torchvision.ops.poolers import LevelMapper

from toolkit.base.batch import (
    first_rows,
    image_of_each,
    is_waited_for,
    normalize_images,
    on_host,
    pad_rows,
    rows_of,
    sizes_on_host,
    to_host,
)
from toolkit.base.box_ops import clip_boxes, resize_boxes
from toolkit.base.seeding import image_generator
from toolkit.detectors.faster_rcnn.criterion import roi_losses, rpn_losses
from toolkit.detectors.faster_rcnn.mask_branch import (
    Positives,
    detected_masks,
    mask_logits,
    mask_loss,
    positives,
    training_parts,
)
from toolkit.detectors.faster_rcnn.options import TwoStageOptions
from toolkit.detectors.faster_rcnn.regions import LevelPool, apply_deltas, begin_proposals, clip, limits_whwh
from toolkit.detectors.faster_rcnn.samples import Draw, Sampler, Truths, padded_truths, sampled_anchors, sampled_boxes
from toolkit.models.detector import Detector
from toolkit.models.nms import class_wise_nms, repeated_until_enough, top_k_rows
from toolkit.models.pasted_masks import masks_in_boxes
from toolkit.step.losses import labelled_classes, unlabelled_columns

MAX_KEPT_ANCHORS = 16  # sizes of batches; 4 MB each at 800 x 1216 px
MIN_BOX_SIDE_PX = 1e-2  # side in pixels, torchvision's

Sizes = Sequence[tuple[int, int]]  # (h, w) of each image in pixels, without padding


class Samples(NamedTuple):
    """The R sampled boxes of all images, image after image.

    rows: (R,) int64, their rows among the candidates: for each image its proposals, followed by its annotated boxes.
    boxes: (R, 4) xyxy in pixels of the model's images. boxes_on_host: the same on the CPU; None: not copied. counts:
    number of samples of each image, R in total.
    """

    rows: Tensor
    boxes: Tensor
    boxes_on_host: Tensor | None
    counts: list[int]


class FasterRCNN(Detector):
    """A Faster R-CNN made of torchvision's modules, under torchvision's names. Its subclasses in
    `toolkit.detectors.faster_rcnn.build` are built from settings.

    Args:
        model: torchvision's detector, whose `backbone`, `rpn`, `roi_heads`, image mean and image deviation are used.
            The backbone converts normalised images to an OrderedDict of maps with equal channels, finest first.
        strides: strides in pixels of the maps that boxes are pooled from, each twice the one before. These maps are the
            first of the backbone's; a further one is for proposals only.
        stages: settings, some of which (such as `rpn_crowd_overlap`) torchvision's modules do not have.

    `features`, `map_channels`, `proposals`, `box_pool`, `box_head`, `class_logits`, `representation_size` and
    `detect_with_logits` are for models built on top, such as scene graphs.
    """

    loss_names = ("loss_objectness", "loss_rpn_box_reg", "loss_classifier", "loss_box_reg")
    default_weights = dict.fromkeys(loss_names, 1.0)
    metric_names = ("class_error",)
    divided_by = "images"
    masks_unlabelled = True
    weighs_classes = True
    buffers_steer_training = False
    exported_sides = "any"
    class_tensors = {  # background first
        "roi_heads.box_predictor.cls_score.*": (1, 1, 0),
        "roi_heads.box_predictor.bbox_pred.*": (4, 4, 0),
        "roi_heads.mask_predictor.mask_fcn_logits.*": (1, 1, 0),
    }

    def __init__(self, model: torchvision_models.FasterRCNN, strides: Sequence[int], stages: TwoStageOptions):
        super().__init__()
        self.backbone = model.backbone
        self.rpn = model.rpn
        self.roi_heads = model.roi_heads
        self.stages = stages
        self.strides = tuple(strides)
        self._kept_anchors: dict[tuple, Tensor] = {}  # by device and sizes of the maps, see `_anchors`
        self.rpn.min_size = stages.rpn_min_size
        self.mean = tuple(model.transform.image_mean)
        self.std = tuple(model.transform.image_std)
        self.map_channels = self.backbone.out_channels  # C, the width of the feature maps
        self.representation_size = self.roi_heads.box_predictor.cls_score.in_features  # D of the box head
        self.roi_heads.box_roi_pool = _level_pool(self.roi_heads.box_roi_pool, strides)
        self.predicts_masks = stages.masks
        if stages.masks:
            self.roi_heads.mask_roi_pool = _level_pool(self.roi_heads.mask_roi_pool, strides)
            self.divided_by = {**dict.fromkeys(self.loss_names, "images"), "loss_mask": "images_with_objects"}
            self.loss_names = tuple(self.divided_by)
            self.default_weights = dict.fromkeys(self.loss_names, 1.0)

    @property
    def box_pool(self) -> MultiScaleRoIAlign:
        """Return the module that pools the R boxes of all images, `(maps, boxes per image, image sizes)`, to (R, C, 7,
        7)."""
        return self.roi_heads.box_roi_pool

    @property
    def box_head(self) -> nn.Module:
        """Return the module that converts pooled features (R, C, 7, 7) of R boxes to vectors (R,
        `representation_size`)."""
        return self.roi_heads.box_head

    def features(
        self,
        images: Tensor,
        sizes: Tensor,
        targets: Sequence[Mapping] | None = None,
    ) -> tuple[OrderedDict[str, Tensor], list[tuple[int, int]]]:
        """Return feature maps (B, C, h, w) by name, and the sizes (height, width) of the images without padding, on the
        host.

        Args:
            images: (B, 3, H, W) uint8, padded on the right and below to a multiple of 32.
            sizes: (B, 2) int64, height and width of each image without padding.
            targets: if given, image sizes are read from their copies on the host, which avoids a synchronisation.
        """
        images_hw = sizes_on_host(sizes, targets)
        pixels = normalize_images(images, sizes, self.mean, self.std)
        return self.backbone(pixels), images_hw

    def proposals(self, features: Mapping[str, Tensor], images_hw: Sizes) -> list[Tensor]:
        """Return the proposals of each image i, (P_i, 4) float32 xyxy pixels without gradient, best first."""
        proposals, _ = self._begin_proposals(*self._predict_anchors(features), images_hw)()
        return proposals

    def detect(
        self,
        features: Mapping[str, Tensor],
        boxes: list[Tensor],
        images_hw: Sizes,
        boxes_on_host: Sequence[Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return class logits (R, 1 + C), background first, and deltas (R, 1 + C, 4), both float32, of given boxes.

        boxes: (P_i, 4) of each image i, R in total. boxes_on_host: the same boxes on the CPU, if available; they avoid
        a host synchronisation.
        """
        pooled = self.box_pool(features, boxes, list(images_hw), boxes_on_host)
        logits, deltas = self.roi_heads.box_predictor(self.box_head(pooled))
        return logits.float(), deltas.float().unflatten(1, (-1, 4))

    def class_logits(self, features: Mapping[str, Tensor], boxes: Sequence[Tensor], pooled: Tensor) -> Tensor:
        """Return class logits (R, 1 + C) float32, background first, of R boxes whose features `pooled` (R, C, 7, 7) are
        already pooled. The other two arguments are not needed here."""
        logits, _ = self.roi_heads.box_predictor(self.box_head(pooled))
        return logits.float()

    def forward(self, images: Tensor, sizes: Tensor, targets: Sequence[Mapping] | None = None) -> dict:
        """Return the predictions of sampled anchors and boxes with their training targets, if targets are given; in
        evaluation or without targets, also what detections are decoded from.

        Args:
            images, sizes: see `features`.
            targets: on the same device; images without objects are background.

        Returns:
            with targets, for `criterion`: of K sampled anchors per image `rpn_logits`, `rpn_match`, `rpn_weights` (B,
            K), `rpn_deltas`, `rpn_targets` (B, K, 4); of R sampled boxes of all images `roi_logits` (R, 1 + C),
            `roi_deltas` (R, 1 + C, 4), `roi_classes`, `roi_weights` (R,), `roi_targets` (R, 4), and, if images are
            partly labelled, `roi_unlabelled` (R, 1 + C); with masks, of the M samples that have an object,
            `mask_logits`, `mask_targets` (M, 28, 28) and `mask_weights` (M,). In evaluation or without targets, for
            `postprocess`: `boxes`, the proposals (P_i, 4) of each image i, of all P of them `logits` (P, 1 + C) and
            `deltas` (P, 1 + C, 4), and with masks `maps`, the feature maps by name.

        Samples are drawn image by image in training, see `image_generator`; in evaluation they are the same every time.
        """
        features, images_hw = self.features(images, sizes, targets)
        return self.from_features(features, images_hw, targets)

    def from_features(
        self,
        features: Mapping[str, Tensor],
        images_hw: Sizes,
        targets: Sequence[Mapping] | None = None,
    ) -> dict:
        """Return what `forward` returns, from maps that `features` has already computed."""
        anchors, logits, deltas, per_level = self._predict_anchors(features)
        read_proposals = self._begin_proposals(anchors, logits, deltas, per_level, images_hw)
        if targets is None:
            boxes, boxes_on_host = read_proposals()
            logits, deltas = self.detect(features, boxes, images_hw, boxes_on_host)
            return self._to_decode(features, boxes, logits, deltas)
        # A GPU chooses proposals, and meanwhile the host launches the sampling of anchors, which does not need them.
        truths = padded_truths(targets)
        draw = self._drawing(targets)
        outputs = self._sampled_anchors(anchors, logits, deltas, truths, draw)
        boxes, boxes_on_host = read_proposals()
        of_boxes, samples = self._sampled_boxes(features, boxes, targets, truths, draw)
        outputs |= of_boxes
        if self.training:
            return outputs | self._detect_samples(features, images_hw, samples)
        return outputs | self._detect_candidates(features, images_hw, boxes, boxes_on_host, samples, targets)

    def _sampled_anchors(
        self, anchors: Tensor, logits: Tensor, deltas: Tensor, truths: Truths, draw: Draw
    ) -> dict[str, Tensor]:
        """Sample anchors; return what `criterion` needs of them. anchors, logits, deltas: of `_predict_anchors`."""
        with torch.no_grad():
            of_rpn = Sampler.of(self.rpn, self.stages.rpn_crowd_overlap)
            index, parts = sampled_anchors(anchors, truths, of_rpn, draw)
        parts["logits"] = logits.gather(1, index)
        parts["deltas"] = deltas.gather(1, index[..., None].expand(-1, -1, 4))
        return {f"rpn_{name}": part for name, part in parts.items()}

    def _sampled_boxes(
        self,
        features: Mapping[str, Tensor],
        boxes: Sequence[Tensor],
        targets: Sequence[Mapping],
        truths: Truths,
        draw: Draw,
    ) -> tuple[dict[str, Tensor], Samples]:
        """Sample boxes; return what `criterion` needs of them, but for their predictions, and the sampled boxes.

        boxes: the proposals (P_i, 4) of each image i.
        """
        o = self.stages
        with torch.no_grad():
            of_box = Sampler.of(self.roi_heads, o.box_crowd_overlap, o.box_bg_iou_from)
            rows, sampled, counts, roi_parts = sampled_boxes(boxes, truths, of_box, draw)
        match = roi_parts.pop("match")
        labelled = labelled_classes(targets, sampled.device)
        if labelled is not None:
            image = image_of_each(counts, sampled.device)
            roi_parts["unlabelled"] = unlabelled_columns(labelled, 0)[image]
        outputs = {f"roi_{name}": part for name, part in roi_parts.items()}
        sampled_on_host = None
        if self.predicts_masks:
            sampled_on_host, match_on_host = to_host([sampled, match])  # the pools need not wait then
            with_object = positives(sampled, sampled_on_host, match_on_host, roi_parts["classes"], counts)
            outputs |= self._mask_parts(features, with_object, targets)
        return outputs, Samples(rows, sampled, sampled_on_host, counts)

    def _detect_samples(self, features: Mapping[str, Tensor], images_hw: Sizes, samples: Samples) -> dict[str, Tensor]:
        """Return the predictions of the sampled boxes: in training, the second stage sees no others."""
        boxes = list(samples.boxes.split(samples.counts))
        boxes_on_host = None if samples.boxes_on_host is None else [samples.boxes_on_host]
        logits, deltas = self.detect(features, boxes, images_hw, boxes_on_host)
        return {"roi_logits": logits, "roi_deltas": deltas}

    def _detect_candidates(
        self,
        features: Mapping[str, Tensor],
        images_hw: Sizes,
        boxes: list[Tensor],
        boxes_on_host: Sequence[Tensor],
        samples: Samples,
        targets: Sequence[Mapping],
    ) -> dict:
        """Return the predictions of the sampled boxes, and what detections are decoded from.

        In evaluation, the samples are drawn from the proposals and the annotated boxes. The second stage sees all of
        these once; the samples are rows of its result, and so are the proposals.
        """
        counts = [len(image_boxes) + len(target["boxes"]) for image_boxes, target in zip(boxes, targets, strict=True)]
        candidates = list(_with_objects(boxes, targets).split(counts))
        candidates_on_host = _with_objects(boxes_on_host, [on_host(target) for target in targets])
        logits, deltas = self.detect(features, candidates, images_hw, [candidates_on_host])
        of_samples = {"roi_logits": logits[samples.rows], "roi_deltas": deltas[samples.rows]}
        logits = _without_objects(logits, boxes, counts)
        deltas = _without_objects(deltas, boxes, counts)
        return of_samples | self._to_decode(features, boxes, logits, deltas)

    def _to_decode(self, features: Mapping[str, Tensor], boxes: list[Tensor], logits: Tensor, deltas: Tensor) -> dict:
        outputs = {"boxes": boxes, "logits": logits, "deltas": deltas}
        if self.predicts_masks:
            outputs["maps"] = features
        return outputs

    def _mask_parts(
        self, features: Mapping[str, Tensor], samples: Positives, targets: Sequence[Mapping]
    ) -> dict[str, Tensor]:
        logits = mask_logits(
            self.roi_heads, features, samples.boxes, samples.classes, samples.counts, samples.boxes_on_host
        )
        parts = {"logits": logits, **training_parts(samples, targets)}
        return {f"mask_{name}": part for name, part in parts.items()}

    def denominators(self, targets: Sequence[Mapping]) -> dict[str, float]:
        """Return the number of images, and with masks `images_with_objects`, the number of those with an object that is
        not a crowd region and has a mask.

        Losses are means over the samples of an image, averaged over images, so the number of samples on other ranks is
        not needed. Only images with objects have samples for masks.
        """
        counts = {"images": float(len(targets))}
        if self.predicts_masks:
            wanted = [(target["iscrowd"] == 0) & target.get("has_mask", torch.tensor(True)) for target in targets]
            counts["images_with_objects"] = float(sum(bool(of_image.any()) for of_image in wanted))
        return counts

    def criterion(self, outputs: Mapping[str, Tensor], targets: Sequence[Mapping], denominators: Mapping):
        """Return losses of this micro-batch, sums over its images / denominators["images"] (`loss_mask`:
        "images_with_objects"), and metrics as (sum, count).

        class_error: per cent of the sampled boxes with an object whose best class is another one, or background.
        """
        objectness, rpn_boxes = rpn_losses(
            outputs["rpn_logits"].flatten(0, 1),
            outputs["rpn_deltas"].flatten(0, 1),
            outputs["rpn_match"].flatten(0, 1),
            outputs["rpn_targets"].flatten(0, 1),
            outputs["rpn_weights"].flatten(0, 1),
            self.stages.rpn_smooth_l1_beta,
        )
        classifier, boxes = roi_losses(
            outputs["roi_logits"],
            outputs["roi_deltas"],
            outputs["roi_classes"],
            outputs["roi_targets"],
            outputs["roi_weights"],
            self.stages.box_smooth_l1_beta,
            outputs.get("roi_unlabelled"),
            self.class_weights,
        )
        images = denominators["images"]
        losses = {
            "loss_objectness": objectness / images,
            "loss_rpn_box_reg": rpn_boxes / images,
            "loss_classifier": classifier / images,
            "loss_box_reg": boxes / images,
        }
        if self.predicts_masks:
            of_masks = mask_loss(outputs["mask_logits"], outputs["mask_targets"], outputs["mask_weights"])
            losses["loss_mask"] = of_masks / denominators["images_with_objects"]
        positive = outputs["roi_classes"] > 0
        best_class = outputs["roi_logits"].argmax(dim=1)
        wrong = (best_class != outputs["roi_classes"]) & positive
        return losses, {"class_error": (100.0 * wrong.sum(), positive.sum())}

    @property
    def object_limits(self) -> dict[str, int]:
        return {"model.detections_per_image": self.max_detections}

    @property
    def max_detections(self) -> int:
        """Return the largest number of detections of an image: `detections_per_image` of the settings."""
        return self.roi_heads.detections_per_img

    def decode(
        self,
        outputs: Mapping,
        sizes: Tensor,
        orig_sizes: Tensor,
        score_threshold: float,
        top_k: int,
    ) -> tuple[Tensor, Tensor, Tensor] | tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
        """Return boxes after class-wise suppression, best first, clipped to the image; at most `detections_per_image`
        of the settings, with scores above the `score_threshold` of the settings. See `Detector.decode`.

        With masks also `masks` (B, K, 28, 28), in the boxes, 0 for detections that `postprocess` drops; the host then
        waits for the device, because masks are computed for the others only.
        """
        counts = [len(image_boxes) for image_boxes in outputs["boxes"]]
        proposals = torch.cat(outputs["boxes"])[:, None]  # (P, 1, 4)
        deltas = outputs["deltas"][:, 1:]  # (P, C, 4)
        boxes = apply_deltas(deltas, proposals, self.roi_heads.box_coder.weights)
        scores = outputs["logits"].softmax(-1)[:, 1:]
        scores = scores.where(scores > score_threshold, 0)
        boxes, scores, labels = self.best_detections(
            pad_rows(boxes, counts),
            pad_rows(scores, counts),
            sizes,
        )
        found = resize_boxes(boxes, sizes, orig_sizes), scores, labels
        if not self.predicts_masks:
            return found
        is_kept = (labels >= 0) & (scores > score_threshold)
        is_kept &= is_kept.cumsum(1) <= top_k
        return *found, {"masks": detected_masks(self.roi_heads, outputs["maps"], boxes, labels, is_kept)}

    def paste_masks(self, masks: Tensor, boxes_xyxy: Tensor, size_hw: tuple[int, int]) -> Tensor:
        return masks_in_boxes(masks, boxes_xyxy, size_hw)

    def best_detections(self, boxes: Tensor, scores: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Choose the best detections of each image from the boxes (B, P, C, 4) and scores (B, P, C) of its P proposals.

        Boxes are clipped to the image. Boxes with a side below `MIN_BOX_SIDE_PX` and scores up to `score_thresh` are
        dropped; class-wise suppression of the others follows.

        Returns boxes (B, K, 4) in pixels of the model's images, and scores and labels (B, K), where K is
        `detections_per_image`. Rows with label -1 hold no detection.
        """
        heads = self.roi_heads
        proposals, classes = scores.shape[1:]
        boxes = clip_boxes(boxes.flatten(1, 2), sizes)  # (B, P * C, 4): all classes of a proposal, then the next one
        sides = boxes[..., 2:] - boxes[..., :2]
        is_large = (sides >= MIN_BOX_SIDE_PX).all(-1)
        scores = scores.flatten(1).where(is_large, 0)
        candidates = scores.where(scores > heads.score_thresh, 0)
        by_class = candidates.unflatten(1, (proposals, classes)).transpose(1, 2)  # (B, C, P)
        by_class_boxes = boxes.unflatten(1, (proposals, classes)).transpose(1, 2)
        turns = class_wise_nms(by_class_boxes, by_class, heads.nms_thresh)
        turns = turns.transpose(1, 2).flatten(1)  # (B, P * C)
        turns, rows = top_k_rows(turns, heads.detections_per_img)
        labels = rows % classes
        return rows_of(boxes, rows), scores.gather(1, rows), labels.where(turns > 0, -1)

    @torch.no_grad()
    def detect_with_logits(
        self,
        features: Mapping[str, Tensor],
        images_hw: Sizes,
        *,
        top_k: int = 80,
        further_boxes: Sequence[Tensor] | None = None,
        outputs: Mapping | None = None,
    ) -> list[dict[str, Tensor]]:
        """Return detections with the second stage's outputs, for scene graphs; one class per proposal.

        Suppression is class by class. Of the classes of a proposal that remain, the one with the best score counts, as
        in Scene-Graph-Benchmark. The thresholds are those of `postprocess`.

        Args:
            features, images_hw: the results of `features`.
            top_k: largest number of detections per image; the best are kept.
            further_boxes: (M, 4) per image, M boxes that are classified in addition to the detector's own proposals.
            outputs: result of `from_features` on these maps in evaluation, if available; ignored with `further_boxes`.

        Returns:
            a dict per image with its K detections, best first, in pixels of the model's images: boxes (K, 4), labels
            (K,) from 0, scores (K,), logits (K, 1 + C) and boxes_per_class (K, 1 + C, 4), both with background first,
            and on_host, a dict with `boxes` on the CPU.
        """
        heads = self.roi_heads
        if further_boxes is None:
            outputs = outputs or self.from_features(features, images_hw)
            proposals = outputs["boxes"]
            logits = outputs["logits"]
            deltas = outputs["deltas"]
        else:
            proposals = self.proposals(features, images_hw)
            proposals = [torch.cat(both) for both in zip(proposals, further_boxes, strict=True)]
            logits, deltas = self.detect(features, proposals, images_hw)
        decoded = apply_deltas(deltas, torch.cat(proposals)[:, None], heads.box_coder.weights)  # (R, 1 + C, 4)
        counts = [len(boxes) for boxes in proposals]
        return of_one_class_each(
            logits,
            decoded,
            counts,
            images_hw,
            heads.score_thresh,
            heads.nms_thresh,
            top_k,
        )

    def _predict_anchors(self, features: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, list[int]]:
        """Return anchors (A, 4), their logits (B, A) and deltas (B, A, 4), all float32, and their number per level."""
        maps = list(features.values())
        logits, deltas = self.rpn.head(maps)
        per_level = [level[0].numel() for level in logits]
        logits, deltas = concat_box_prediction_layers(logits, deltas)
        anchors = self._anchors([level.shape[-2:] for level in maps], maps[0].device)
        count = len(maps[0])
        logits = logits.float().view(count, -1)
        deltas = deltas.float().view(count, -1, 4)
        return anchors, logits, deltas, per_level

    def _anchors(self, grids: Sequence[torch.Size], device: torch.device) -> Tensor:
        """Return the anchors (A, 4) float32 of all levels, whose maps have the sizes `grids`.

        Those of a few sizes are kept: to make them takes eight kernels of a GPU for each level.
        """
        if torch.compiler.is_compiling():
            return self._make_anchors(grids, device)
        kept = self._kept_anchors
        key = (device, *grids)
        if key not in kept:
            if len(kept) == MAX_KEPT_ANCHORS:
                del kept[next(iter(kept))]
            with torch.inference_mode(False):  # whose tensors could not be used in training
                kept[key] = self._make_anchors(grids, device)
        return kept[key]

    def _make_anchors(self, grids: Sequence[torch.Size], device: torch.device) -> Tensor:
        finest_height, finest_width = grids[0]
        image_height = finest_height * self.strides[0]
        image_width = finest_width * self.strides[0]
        grid_strides = [[image_height // height, image_width // width] for height, width in grids]
        generator = self.rpn.anchor_generator
        generator.set_cell_anchors(torch.float32, device)  # torchvision takes the maps' dtype: half precision
        return torch.cat(generator.grid_anchors(grids, grid_strides)).float()

    @torch.no_grad()
    def _begin_proposals(
        self,
        anchors: Tensor,
        logits: Tensor,
        deltas: Tensor,
        per_level: list[int],
        images_hw: Sizes,
    ) -> Callable[[], tuple[list[Tensor], list[Tensor]]]:
        """Return a function that returns the proposals (P_i, 4) of each image, and the same on the host; a GPU computes
        them until it is called."""
        rpn = self.rpn
        boxes = apply_deltas(deltas, anchors, self.rpn.box_coder.weights)
        if not is_waited_for(boxes.device):
            proposals, _ = rpn.filter_proposals(boxes, logits, list(images_hw), per_level)
            return lambda: (proposals, proposals)
        return begin_proposals(
            boxes,
            logits,
            per_level,
            limits_whwh(images_hw, boxes.device),
            before=rpn.pre_nms_top_n(),
            after=rpn.post_nms_top_n(),
            threshold=rpn.nms_thresh,
            min_size=rpn.min_size,
            min_score=rpn.score_thresh,
        )

    def _drawing(self, targets: Sequence[Mapping]) -> Draw:
        """Return a function that draws (sum of counts,) random numbers in [0, 1): in training from each image's own
        generator, in evaluation the same ones every time and for every image."""
        device = self.roi_heads.box_predictor.cls_score.weight.device
        generators = [image_generator(target, "samples", device) for target in targets]

        def draw(counts: Sequence[int]) -> Tensor:
            if self.training:
                drawn = []
                for count, generator in zip(counts, generators, strict=True):
                    drawn.append(torch.rand(count, device=device, generator=generator))
                return torch.cat(drawn)
            always_alike = torch.Generator(device).manual_seed(0)
            same = torch.rand(max(counts, default=0), device=device, generator=always_alike)
            return torch.cat([same[:count] for count in counts])

        return draw


def _level_pool(pool: MultiScaleRoIAlign, strides: Sequence[int]) -> LevelPool:
    """Return a `LevelPool` like `pool` from maps of these strides in pixels; torchvision guesses the scales from the
    first batch it sees, and wrongly from small padded images."""
    first_level = int(strides[0]).bit_length() - 1  # 2 for a stride of 4, 3 for 8
    last_level = int(strides[-1]).bit_length() - 1
    level_pool = LevelPool.of(pool)
    level_pool.scales = [1 / stride for stride in strides]
    level_pool.map_levels = LevelMapper(
        first_level,
        last_level,
        pool.canonical_scale,
        pool.canonical_level,
    )
    return level_pool


def _with_objects(boxes: Sequence[Tensor], targets: Sequence[Mapping]) -> Tensor:
    """Return (P, 4): the boxes of each image, followed by those of its objects."""
    parts = []
    for proposals, target in zip(boxes, targets, strict=True):
        parts += [proposals, target["boxes"]]
    return torch.cat(parts)


def _without_objects(rows: Tensor, boxes: Sequence[Tensor], counts: Sequence[int]) -> Tensor:
    """Return the rows (P, ...) of the boxes of each image, from those of `_with_objects`, `counts` an image."""
    parts = []
    for of_image, proposals in zip(rows.split(counts), boxes, strict=True):
        parts.append(of_image[: len(proposals)])
    return torch.cat(parts)


def of_one_class_each(
    logits: Tensor,
    boxes: Tensor,
    counts: Sequence[int],
    images_hw: Sizes,
    score_threshold: float,
    nms_threshold: float,
    top_k: int,
) -> list[dict[str, object]]:
    """Choose detections from proposals as `FasterRCNN.detect_with_logits` does, and return the same dicts.

    logits (P, 1 + C) and boxes (P, 1 + C, 4) are of the P proposals of all images, and `counts` is their number per
    image.
    """
    limits = limits_whwh(images_hw, logits.device)[:, None, None]

    def select() -> tuple[list[Tensor], dict[str, Tensor]]:
        per_class = clip(pad_rows(boxes, counts), limits)  # (B, P, 1 + C, 4)
        probabilities = logits.softmax(-1)[:, 1:]
        scores = pad_rows(probabilities, counts).transpose(1, 2)  # (B, C, P)
        scores = scores.where(scores > score_threshold, 0)
        turns = class_wise_nms(per_class[:, :, 1:].transpose(1, 2), scores, nms_threshold)
        best, label = scores.where(turns > 0, 0).max(1)  # (B, P)
        best, rows = top_k_rows(best, top_k)  # (B, K)
        label = label.gather(1, rows)
        per_class = rows_of(per_class, rows)
        of_label = (label + 1)[..., None, None].expand(-1, -1, 1, 4)  # column 0 is the background
        chosen = per_class.gather(2, of_label)[:, :, 0]  # (B, K, 4)
        columns = {
            "boxes": chosen,
            "labels": label,
            "scores": best,
            "logits": rows_of(pad_rows(logits, counts), rows),
            "boxes_per_class": per_class,
        }
        found = (best > 0).sum(1)
        return [found, chosen], columns

    (found_on_host, boxes_on_host), columns = repeated_until_enough(select)
    found = found_on_host.tolist()
    detections = first_rows(found, columns)
    copies = first_rows(found, {"boxes": boxes_on_host})
    return [{**image, "on_host": copy} for image, copy in zip(detections, copies, strict=True)]


def with_boxes_on_host(detections: Sequence[Mapping[str, Tensor]]) -> list[dict[str, object]]:
    """Return copies of the detections of some images with a further entry `on_host`, a dict with their `boxes` on the
    CPU. The boxes of all images are copied at once."""
    copies = to_host([image["boxes"] for image in detections])
    result = []
    for image, boxes in zip(detections, copies, strict=True):
        result.append({**image, "on_host": {"boxes": boxes}})
    return result
