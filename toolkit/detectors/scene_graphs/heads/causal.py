"""Causal analysis of predicates (Tang et al., "Unbiased Scene Graph Generation from Biased Training", CVPR 2020).

Three branches (context of the objects, union features, frequency of the labels) are trained together. In evaluation,
the effect of the context alone is the difference between the predictions with and without the context.
"""

import torch
from torch import Tensor, nn

from toolkit.base.errors import BadInput
from toolkit.detectors.scene_graphs.box_features import PAIR_GEOMETRY_DIM, pair_numbers, scaled_box_numbers
from toolkit.detectors.scene_graphs.frequency import FrequencyBias
from toolkit.detectors.scene_graphs.heads.layers import (
    POSITION_DIM,
    HeadSizes,
    ObjectContext,
    RunningMean,
    batch_box_numbers,
    empty_output,
    fc,
    label_embedding,
    split_layer,
    subject_object_features,
    tree_losses,
    xavier_linear,
)
from toolkit.detectors.scene_graphs.heads.motifs import MotifsContext
from toolkit.detectors.scene_graphs.heads.vctree import VCTreeContext
from toolkit.detectors.scene_graphs.relation_batch import RelationBatch, RelationOutput, predicate_loss

EFFECTS = ("none", "TDE", "NIE", "TE")


class VTransEContext(ObjectContext):
    """The context without exchange between objects (VTransE, Zhang et al., CVPR 2017, as in Scene-Graph-Benchmark).

    Each object is classified by itself, in predcls too, where the given label is only part of the input. The predicted
    class may be background.
    """

    def __init__(self, mode: str, sizes: HeadSizes):
        super().__init__(mode, sizes)
        self.object_out = fc(sizes.object_dim, sizes.num_classes)
        self.edge_out = fc(sizes.object_dim, sizes.hidden_dim)
        self.mean_object_input = RunningMean(sizes.object_dim)
        self.mean_edge_input = RunningMean(sizes.roi_dim + POSITION_DIM)

    def forward(self, batch: RelationBatch, from_averages: bool = False) -> tuple[Tensor, Tensor, Tensor, None]:
        """Return object logits (N, C), labels (N,), context (N, hidden), and None.

        from_averages: compute them from the running means of the inputs instead of the inputs.
        """
        position = self.position(batch_box_numbers(batch))
        embedded = label_embedding(self.embed_in, batch, self.mode)
        object_input = torch.cat([batch.roi_features, embedded, position], 1)
        edge_input = torch.cat([batch.roi_features, position], 1)
        object_input = self.mean_object_input(object_input, from_averages)
        edge_input = self.mean_edge_input(edge_input, from_averages)
        logits = self.object_out(object_input)
        labels = logits.argmax(1)
        words = logits.softmax(1) @ self.embed_out.weight if from_averages else self.embed_out(labels)
        edges = self.edge_out(torch.cat([edge_input, words], 1)).relu()
        return logits, labels, edges, None


class CausalHead(nn.Module):
    """The causal head with the context motifs, vctree or vtranse.

    The logits of the branches are added (fusion "sum"), or those of the context are gated by the other branches
    ("gate").

    The attribute `effect` is used in evaluation only: "none" is the plain prediction. The others subtract a prediction
    in which something is replaced by a reference without evidence: TDE the context; NIE the labels, with the reference
    context on both sides; TE both. The reference comes from a second pass of the context layer on the running means of
    its inputs.
    """

    def __init__(
        self,
        mode: str,
        sizes: HeadSizes,
        log_frequency: Tensor,
        context: str = "motifs",
        fusion: str = "sum",
        effect: str = "none",
        use_positions: bool = True,
        dropout: float = 0.2,
        nms_threshold: float = 0.5,
        separate_spatial: bool = False,
    ):
        """Build the head.

        use_positions: multiply the context by an embedding of 32 numbers that describe both boxes. separate_spatial:
        also multiply it by the batch's `spatial_features`. effect: in upper or lower case.
        """
        super().__init__()
        spelled = {name.lower(): name for name in EFFECTS}
        effect = spelled.get(effect.lower(), effect)
        _check_head_options(context, fusion, effect, sizes)
        self.sizes = sizes
        self.fusion = fusion
        self.effect = effect
        self.translates = context == "vtranse"
        hidden = sizes.hidden_dim
        pooling = sizes.pooling_dim
        num_predicates = sizes.num_predicates
        if context == "motifs":
            self.context = MotifsContext(mode, sizes, dropout, nms_threshold, keep_averages=True)
        elif context == "vctree":
            self.context = VCTreeContext(mode, sizes, log_frequency, dropout, keep_averages=True)
        else:
            self.context = VTransEContext(mode, sizes)
        self.of_labels = () if self.translates else ("context.decoder",)
        if self.translates:
            self.split = split_layer(hidden, 2 * pooling)
            self.context_out = nn.Linear(pooling, num_predicates, bias=False)
        else:
            self.split = split_layer(hidden, 2 * hidden)
            self.join = xavier_linear(2 * hidden, pooling)
            self.context_out = xavier_linear(pooling, num_predicates)
        self.visual_out = xavier_linear(pooling, num_predicates)
        self.gate = xavier_linear(pooling, num_predicates) if fusion == "gate" else None
        self.frequency = FrequencyBias(log_frequency)
        self.mean_spatial = RunningMean(pooling) if separate_spatial else None
        self.positions = self.mean_positions = None
        if use_positions:
            self.positions = nn.Sequential(
                xavier_linear(PAIR_GEOMETRY_DIM, hidden),
                nn.ReLU(),
                xavier_linear(hidden, pooling),
                nn.ReLU(),
            )
            self.mean_positions = RunningMean(PAIR_GEOMETRY_DIM)
        self._announce(context)

    def _announce(self, context: str) -> None:
        self.loss_names = ("loss_rel", "loss_refine_obj", "auxiliary_ctx")
        if self.fusion == "sum":
            self.loss_names += ("auxiliary_vis", "auxiliary_frq")
        if context == "vctree":
            self.loss_names += ("binary_loss",)

    def forward(self, batch: RelationBatch) -> RelationOutput:
        if not len(batch.boxes_xyxy):
            return empty_output(self.sizes, self.context_out.weight)
        logits, labels, context, related = self.context(batch)
        pair_context = self._pair_context(context, batch)
        if batch.spatial_features is not None:
            pair_context = pair_context * batch.spatial_features
        if self.positions is not None:
            of_boxes = scaled_box_numbers(batch.boxes_xyxy, batch.sizes_hw[batch.image])
            subjects, objects = batch.pairs.unbind(1)
            numbers = pair_numbers(of_boxes[subjects], of_boxes[objects])
            pair_context = pair_context * self.positions(numbers)
        subject_labels, object_labels = labels[batch.pairs].unbind(1)
        frequency = self.frequency(subject_labels, object_labels)
        losses = {}
        if self.training:
            losses = self._branch_losses(batch, pair_context, frequency, related)
            if self.positions is not None:
                self.mean_positions(numbers)
            if batch.spatial_features is not None:
                self.mean_spatial(batch.spatial_features)
        if self.training or self.effect == "none":
            relation_logits = self._fuse(batch.union_features, pair_context, frequency)
        else:
            relation_logits = self._effect(batch, pair_context, logits)
        return RelationOutput(logits, relation_logits, labels, context, losses)

    def _pair_context(self, context: Tensor, batch: RelationBatch) -> Tensor:
        subject, obj = subject_object_features(self.split(context), batch.pairs)
        if self.translates:
            return subject - obj
        return self.join(torch.cat([subject, obj], 1)).relu()

    def _fuse(self, visual: Tensor, pair_context: Tensor, frequency: Tensor) -> Tensor:
        from_context = self.context_out(pair_context)
        from_vision = self.visual_out(visual)
        if self.gate is None:
            return from_vision + from_context + frequency
        return from_context * (from_vision + frequency + self.gate(pair_context)).sigmoid()

    def _branch_losses(self, batch: RelationBatch, pair_context, frequency, related) -> dict:
        """Compute a loss for each branch by itself: each must be able to predict without the others, else their
        differences mean nothing."""
        branches = {"auxiliary_ctx": self.context_out(pair_context)}
        if self.fusion == "sum":
            branches |= {
                "auxiliary_vis": self.visual_out(batch.union_features),
                "auxiliary_frq": frequency,
            }
        losses = {}
        for name, logits in branches.items():
            losses[name] = predicate_loss(logits.float(), batch.relation_labels, batch.num_pairs)
        return losses | tree_losses(related, batch)

    def _effect(self, batch: RelationBatch, pair_context: Tensor, logits: Tensor) -> Tensor:
        mean_logits, _, mean_context, _ = self.context(batch, from_averages=True)
        without = self._pair_context(mean_context, batch)
        if self.positions is not None:
            without = without * self.positions(self.mean_positions.expanded(1))
        if batch.spatial_features is not None:
            without = without * self.mean_spatial.expanded(1)
        # Nearly equal numbers are subtracted below: in half precision their difference would be noise.
        with torch.autocast(pair_context.device.type, enabled=False):
            visual = batch.union_features.float()
            context = pair_context.float()
            without = without.float()
            frequency = self._expected_frequency(logits, batch.pairs)
            if self.effect == "TDE":
                return self._fuse(visual, context, frequency) - self._fuse(visual, without, frequency)
            mean_frequency = self._expected_frequency(mean_logits, batch.pairs)
            reference = self._fuse(visual, without, mean_frequency)
            kept_context = without if self.effect == "NIE" else context
            return self._fuse(visual, kept_context, frequency) - reference

    def _expected_frequency(self, object_logits: Tensor, pairs: Tensor) -> Tensor:
        probabilities = object_logits.float().softmax(1)
        subject, obj = probabilities[pairs].unbind(1)
        return self.frequency.expected(subject, obj)


def _check_head_options(context: str, fusion: str, effect: str, sizes: HeadSizes) -> None:
    options = (
        ("context", context, ("motifs", "vctree", "vtranse")),
        ("fusion", fusion, ("sum", "gate")),
        ("effect", effect, EFFECTS),
    )
    faults = []
    for key, value, choices in options:
        if value not in choices:
            faults.append(f"{key} is {value!r}; expected {', '.join(choices)}")
    if sizes.union_dim != sizes.pooling_dim:
        faults.append(f"union features of {sizes.union_dim} for a pooled size of {sizes.pooling_dim}; must be equal")
    if faults:
        raise BadInput(faults)
