"""Loss weights, the denominators that make accumulation and several ranks equal to one big batch, weights of classes,
and losses of images that do not label all classes."""

import math
import re
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, nn

from toolkit.base.batch import send
from toolkit.base.distributed import all_reduce, world
from toolkit.base.errors import BadInput
from toolkit.base.text import did_you_mean
from toolkit.step.optim import average_gradients

# Endings by which the DETR family names the copies of a loss: decoder layers, encoder, denoising.
_AUXILIARY = re.compile(r"(_(\d+|aux|enc|dn|pre))+")

Weight = float | str | Sequence[Sequence[float]]


@dataclass
class WeightedLosses:
    """The losses of one micro-batch.

    total: scalar to call `backward` on, float32 (float64 when a loss is).
    weighted, unweighted: detached scalars by name, for logging.
    unknown: names of losses that were not announced; these losses are neither weighted nor part of the total. Give the
        names to `reduce_dict`, which raises an error on every rank; an error on one rank would leave the others
        waiting.
    """

    total: Tensor
    weighted: dict[str, Tensor]
    unweighted: dict[str, Tensor]
    unknown: list[str]


class LossWeights(nn.Module):
    """A weighted sum of named losses, with constant, scheduled and learned weights.

    A weight given for `loss_ce` also covers the layers `loss_ce_0`, `loss_ce_enc`, `loss_ce_aux_0`, `loss_ce_dn_0`; one
    given for an exact name overrides it.

        weights = LossWeights({"loss_ce": 1.0, "loss_bbox": 5.0})    # in a loop of your own, without a run
        total = weights(losses).total

    Args:
        names: the losses that the model announces; or {name: weight}, which makes the other arguments unnecessary.
        weights: by name, each a number; or [[step, value], ...], linear between the steps and constant beyond them; or
            "learned": exp(-s) * loss + s with one trained s per entry, shared by the layers that the entry covers; at
            first exp(-s) is the default weight (homoscedastic uncertainty, Kendall et al., CVPR 2018, for any kind of
            loss).
        default_weights: the model's own weights, for losses that `weights` does not cover.

    Raises:
        BadInput: an announced name without a weight, a weight without an announced name, a value that is not a weight;
            all of them at once.
    """

    def __init__(
        self,
        names: Sequence[str] | Mapping[str, Weight],
        weights: Mapping[str, Weight] = MappingProxyType({}),
        default_weights: Mapping[str, float] = MappingProxyType({}),
    ):
        super().__init__()
        if isinstance(names, Mapping):
            weights = {**names, **weights}
        self.names = tuple(names)
        given = {key: _parse(value) for key, value in weights.items()}
        defaults = {key: float(value) for key, value in default_weights.items()}
        # An entry of `weights` wins over any default, an exact or longer name over a shorter one.
        owners = {name: _owner(name, given) or _owner(name, defaults) for name in self.names}
        entries = {**defaults, **given}
        _check_weights(owners, given, entries, weights)
        self._entries = {name: entries.get(owner) for name, owner in owners.items()}
        self._learned = {name: owner for name, owner in owners.items() if self._entries[name] == "learned"}
        log_variances = {}
        for owner in self._learned.values():
            start = defaults.get(_owner(owner, defaults) or "", 1.0)
            initial = -math.log(start) if start > 0 else 0.0
            log_variances[owner] = nn.Parameter(torch.tensor(initial))
        self.log_variances = nn.ParameterDict(log_variances)
        self._cached: tuple[object, Tensor] | None = None
        # The loop of a run sets these for each micro-batch.
        # Further losses, such as distillation: each returns them when called, and has a context manager
        # `watching(batch)` for the forward pass of a micro-batch.
        self.sources: list[Callable[[], Mapping[str, Tensor]]] = []
        self.denominators = "global"  # or "original", see `window_denominators`
        self.divided_by: dict[str, str] = {}  # losses that are means over the "images" or "boxes" of a micro-batch
        self.defers_unknown = False  # whether `forward` leaves it to `reduce_dict` to raise on every rank
        self._shares: Mapping[str, Tensor] = {}
        self._step = 0
        self._micro_batches = 1

    def add(self, name: str, weight: Weight, divided_by: str | None = None) -> None:
        """Announce one more loss, after those of the model.

        divided_by: "images" or "boxes", if the value of the loss is a mean over the images or boxes of a micro-batch,
            see `begin_micro_batch`; else None.

        Raises BadInput if the name is taken or the weight invalid.
        """
        entry = _parse(weight)
        if name in self.names:
            raise BadInput(f"the loss {name!r} is announced already; announced are {', '.join(self.names)}")
        if entry is None or entry == "learned":
            kinds = "a number, or [[step, value], ...] with increasing steps"
            raise BadInput(f"the loss {name!r}: {weight!r} is not a weight; expected {kinds}")
        self.names = (*self.names, name)
        self._entries[name] = entry
        if divided_by is not None:
            self.divided_by[name] = divided_by

    @property
    def row_names(self) -> list[str]:
        """Names of the losses in a row: the total, and every loss weighted and unscaled."""
        names = ["loss"]
        for name in self.names:
            names += [name, f"{name}_unscaled"]
        return names

    def begin_micro_batch(self, step: int, micro_batches: int, shares: Mapping[str, Tensor]) -> None:
        """Set the step and the shares that `forward` uses, in the loop of a run.

        Args:
            step, micro_batches: as in `forward`.
            shares: by "images" and "boxes": their number in this micro-batch, divided by the denominator for the whole
                window. A loss that is `divided_by` one of the two is multiplied by its share, which makes it a mean
                over the window.
        """
        self._step = step
        self._micro_batches = micro_batches
        self._shares = shares

    def forward(
        self,
        losses: Mapping[str, Tensor],
        step: int | None = None,
        micro_batches: int | None = None,
    ) -> WeightedLosses:
        """Weight the scalars in `losses`; an announced loss that is missing counts 0.

        Args:
            step: optimizer step, for scheduled weights; None: that of `begin_micro_batch`, 0 without it.
            micro_batches: number of micro-batches of this optimizer step. The term s of learned weights is divided by
                it, so that it is counted once per step. None: that of `begin_micro_batch`, 1 without it.

        Raises:
            BadInput: a loss that has no weight. It would be missing in the total, and the model would not learn from
                it.
        """
        for source in self.sources:
            losses = {**losses, **source()}
        for name, kind in self.divided_by.items():
            if name in losses and kind in self._shares:
                losses = {**losses, name: losses[name] * self._shares[kind]}
        step = self._step if step is None else step
        micro_batches = self._micro_batches if micro_batches is None else micro_batches
        weighted = self.weigh(losses, step, micro_batches)
        if weighted.unknown and not self.defers_unknown:
            raise BadInput(
                f"losses without a weight: {', '.join(weighted.unknown)}; weights are given for: "
                f"{', '.join(self.names)}. Give each loss a weight, 0 to leave it out"
            )
        return weighted

    def weigh(self, losses: Mapping[str, Tensor], step: int, micro_batches: int = 1) -> WeightedLosses:
        """Weight the losses as `forward` does, but return the names of losses without a weight in `unknown`.

        An error raised here, on the one rank that has such a loss, would leave the other ranks waiting: give `unknown`
        to `reduce_dict`, which raises an error on every rank.
        """
        names = [name for name in self.names if name in losses]
        if not names:
            raise ValueError(f"none of the announced losses {self.names} came out of the criterion: {list(losses)}")
        device = losses[names[0]].device
        with torch.autocast(device.type, enabled=False):
            has_double = any(losses[name].dtype == torch.float64 for name in names)
            wide = torch.float64 if has_double else torch.float32
            values = torch.stack([losses[name].to(device, wide) for name in names])
            weighted = values * self._weight_vector(names, step, device, wide)
            total = weighted.sum()
            if self.log_variances:  # evaluation weighs its sums, which are on the host
                log_variances = [s.to(device, wide) for s in self.log_variances.values()]
                total = total + sum(log_variances) / micro_batches
        return WeightedLosses(
            total,
            weighted=dict(zip(names, weighted.detach().unbind(), strict=True)),
            unweighted=dict(zip(names, values.detach().unbind(), strict=True)),
            unknown=sorted(set(losses) - set(self.names)),
        )

    def values(self, step: int) -> dict[str, float]:
        """Return the weight of every announced loss at an optimizer step; the host waits for the learned ones."""
        weights = {}
        for name, entry in self._entries.items():
            if entry == "learned":
                log_variance = self.log_variances[self._learned[name]]
                weights[name] = math.exp(-log_variance.item())
            else:
                weights[name] = _at(entry, step)
        return weights

    def parameter_groups(self, lr: float) -> list[dict]:
        """Return a list with one optimizer group, the learned weights without decay; [] if there are none."""
        learned = dict(self.log_variances.items())
        if not learned:
            return []
        group = {
            "name": "loss_weights",
            "params": list(learned.values()),
            "param_names": list(learned),
            "lr": lr,
            "weight_decay": 0.0,
        }
        return [group]

    def average_gradients(self) -> None:
        """Average the gradients of the learned weights over the ranks; a collective.

        DDP averages the gradients of the model it wraps. Call this after the last backward of a step. Without learned
        weights nothing is done.
        """
        average_gradients(list(self.log_variances.values()))

    def _weight_vector(self, names: list[str], step: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Return the weights of the losses, (len(names),)."""
        constants = []
        for name in names:
            entry = self._entries[name]
            constants.append(1.0 if entry == "learned" else _at(entry, step))
        key = (tuple(constants), device, dtype)
        if self._cached is None or self._cached[0] != key:  # copied to the device only when a weight changes
            on_device = torch.tensor(constants, dtype=dtype).to(device, non_blocking=True)
            self._cached = (key, on_device)
        vector = self._cached[1]
        if not self._learned:
            return vector
        factors = []
        for name in names:
            if name in self._learned:
                log_variance = self.log_variances[self._learned[name]].to(device, dtype)
                factors.append(torch.exp(-log_variance))
            else:
                factors.append(vector.new_ones(()))
        return vector * torch.stack(factors)


def window_denominators(
    local: Sequence[Mapping[str, float]],
    device: torch.device | str,
    mode: str = "global",
    averaged: Collection[str] = (),
    dtype: torch.dtype = torch.float32,
) -> list[dict[str, Tensor]]:
    """Return the numbers that the losses of each micro-batch are divided by; DDP must average the gradients over ranks.

    Args:
        local: per micro-batch of the window, the counts of this rank by name (boxes, class weights, images, ...); the
            same names and number of micro-batches on every rank.
        mode: "global": the total over window and ranks, divided by the number of ranks because DDP averages the
            gradients. The mean over ranks of the summed losses is then that of the one big batch.
            "original": each micro-batch by itself, as in the original programs. The counts named in `averaged` are
            means over the ranks, at least 1 (DETR's number of boxes); all other counts are those of this rank (DETR's
            class weights). Both are multiplied by the number of micro-batches, so that the loss of the window is the
            mean of the losses of its micro-batches.
        averaged: names of counts, used by the mode "original".

    Returns:
        Per micro-batch {name: 0-dim tensor on `device`}. A total of 0 becomes 1: only zeros are divided by it. One
        all-reduce in either mode, no host read.
    """
    _, world_size = world()
    names = sorted(local[0])
    rows = []
    for micro in local:
        rows.append([float(micro[name]) for name in names])
    counts = torch.tensor(rows, dtype=torch.float64)  # (micro-batches, names)
    if mode == "global":
        total = all_reduce(_on(counts.sum(0), device))
        positive = torch.where(total > 0, total, 1.0)
        denominators = (positive / world_size).expand(len(local), -1)
    elif mode == "original":
        local_counts = _on(counts, device)
        means = all_reduce(local_counts, "mean").clamp(min=1.0)
        positive = torch.where(local_counts > 0, local_counts, 1.0)
        of_names = torch.tensor([float(name in averaged) for name in names])
        is_averaged = _on(of_names, device) > 0
        denominators = torch.where(is_averaged, means, positive) * len(local)
    else:
        raise BadInput(f"loss.denominators is {mode!r}; expected global or original")
    of_micro_batches = []
    for row in denominators.to(dtype):
        of_micro_batches.append(dict(zip(names, row.unbind(), strict=True)))
    return of_micro_batches


def _on(counts: Tensor, device: torch.device | str) -> Tensor:
    dtype = torch.float32 if torch.device(device).type == "mps" else torch.float64
    return send(counts.to(dtype), device)


def _owner(name: str, keys: Collection[str]) -> str | None:
    """Return the longest key that is `name` or the name of the loss that `name` is a layer of."""
    owning = []
    for key in keys:
        is_layer = name.startswith(key) and _AUXILIARY.fullmatch(name[len(key) :])
        if name == key or is_layer:
            owning.append(key)
    return max(owning, key=len, default=None)


def _parse(value: Weight) -> float | str | tuple[tuple[float, float], ...] | None:
    """Parse a weight; return None if it is invalid."""
    if value == "learned":
        return "learned"
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Sequence) and not isinstance(value, str) and value:
        try:
            points = tuple((float(step), float(weight)) for step, weight in value)
        except (TypeError, ValueError):
            return None
        steps = [step for step, _ in points]
        are_increasing = steps == sorted(set(steps))
        are_finite = all(math.isfinite(step) and math.isfinite(weight) for step, weight in points)
        if are_increasing and are_finite:
            return points
    return None


def _check_weights(owners: dict[str, str | None], given: dict, entries: dict, raw: Mapping[str, Weight]) -> None:
    announced = ", ".join(owners)
    problems = []
    for key, value in given.items():
        if value is None:
            problems.append(
                f'loss.weights.{key}: {raw[key]!r} is not a weight; expected a number, "learned", or '
                "[[step, value], ...] with increasing steps"
            )
    unweighted = [name for name, owner in owners.items() if owner is None]
    if unweighted:
        given_for = ", ".join(entries)
        problems.append(f"losses without a weight: {', '.join(unweighted)}; weights are given for: {given_for}")
    unused = []
    for key in entries:
        if not any(_owner(name, [key]) for name in owners):
            unused.append(key)
    for key in unused:
        near = did_you_mean(key, owners)
        problems.append(f"loss.weights.{key}: this model has no such loss; it has {announced}{near}")
    if problems:
        raise BadInput(problems)


def _at(entry: float | tuple[tuple[float, float], ...], step: int) -> float:
    """Return the weight at an optimizer step: linear between the points, constant before and after them."""
    if isinstance(entry, float):
        return entry
    after = bisect_right(entry, step, key=lambda point: point[0])
    if after in (0, len(entry)):
        _, weight = entry[max(after - 1, 0)]
        return weight
    start, low = entry[after - 1]
    end, high = entry[after]
    return low + (high - low) * (step - start) / (end - start)


# ---- weights of classes ----------------------------------------------------------------------------------------------
# The classification loss of a prediction whose target is an object is multiplied by the weight of the object's class.
# The background has weight 1. Denominators do not change.


def times_class_weights(terms: Tensor, labels: Tensor, class_weights: Tensor) -> Tensor:
    """Return losses times the weights of the classes of their targets.

    Args:
        terms: (...,) losses of predictions, or (..., C) one for each class.
        labels: (...,) int64 class of the target of each prediction, from 0; -1 where it has no object: such losses stay
            as they are.
        class_weights: (C,).
    """
    of_objects = class_weights.to(terms.dtype)[labels.clamp(min=0)]
    factors = torch.where(labels >= 0, of_objects, 1.0)
    if terms.dim() > labels.dim():
        factors = factors[..., None]
    return terms * factors


# ---- images that do not label all classes ----------------------------------------------------------------------------
# An object of an unlabelled class may be in the image, so no loss makes it less likely. `target["labelled"]` (C,) bool
# holds the classes that an image labels.


def labelled_classes(targets: Sequence[Mapping], device: torch.device) -> Tensor | None:
    """Return which classes each image labels, (B, C) bool; None if all images label all classes."""
    if not any("labelled" in target for target in targets):
        return None
    rows = [target["labelled"].to(device, non_blocking=True) for target in targets]
    return torch.stack(rows)


def without_unlabelled(terms: Tensor, positives: tuple[Tensor, ...], labelled: Tensor | None) -> Tensor:
    """Return sigmoid losses with 0 for the classes that an image does not label, except where they have a target.

    Args:
        terms: (L, B, Q, C) losses of L decoder layers and Q queries.
        positives: index tensors into `terms`, one for each dimension, of the classes that queries have as target.
        labelled: (B, C) bool, see `labelled_classes`; None: `terms` is returned unchanged.
    """
    if labelled is None:
        return terms
    counted = labelled[:, None].expand_as(terms).clone()
    counted[positives] = True
    return terms.where(counted, 0)


def unlabelled_columns(labelled: Tensor | None, background: int) -> Tensor | None:
    """Return which columns of a softmax are those of classes that an image does not label, (B, C + 1) bool.

    labelled: (B, C) bool, see `labelled_classes`; None: None is returned. background: the column of the background, 0
    or -1; it is False for every image.
    """
    if labelled is None:
        return None
    always = labelled.new_zeros(len(labelled), 1)
    columns = [always, ~labelled] if background == 0 else [~labelled, always]
    return torch.cat(columns, dim=1)


def partial_log_softmax(logits: Tensor, classes: Tensor, unlabelled: Tensor | None, background: int) -> Tensor:
    """Return log-probabilities (N, C + 1) whose `nll_loss` for `classes` (N,) pushes no unlabelled class down.

    If the background is the target, its probability is added to that of all unlabelled classes, one of which may be in
    the image (Cermelli et al., Modeling the Background, CVPR 2020, equation 5). If a class is the target, the
    unlabelled classes are left out of the softmax; their columns of the result are then equal to that of the
    background. Rows without unlabelled classes have the ordinary log-softmax.

    Args:
        logits: (N, C + 1), or log-probabilities.
        classes: (N,) column of the target of each row.
        unlabelled: (N, C + 1) bool, the row of `unlabelled_columns` for the image of each row; None: all are labelled.
        background: column of the background, 0 or -1.
    """
    if unlabelled is None:
        return logits.log_softmax(1)
    columns = torch.arange(logits.shape[1], device=logits.device)
    is_background = columns == background % logits.shape[1]  # (C + 1,)
    wanted = classes[:, None] == columns  # (N, C + 1)
    # A class is the target: its softmax is that of the labelled classes.
    unknown = unlabelled & ~wanted
    known = logits.masked_fill(unknown, -torch.inf).log_softmax(1)
    known = known.where(~unknown, known[:, background, None])
    # The background is the target: the logarithm of its probability and that of all unlabelled classes together.
    may_be_there = unlabelled | is_background
    nothing = logits.masked_fill(~may_be_there, -torch.inf).logsumexp(1) - logits.logsumexp(1)
    wants_background = (wanted & is_background).any(1, keepdim=True)
    partial = torch.where(wants_background, nothing[:, None], known)
    return torch.where(unlabelled.any(1, keepdim=True), partial, logits.log_softmax(1))
