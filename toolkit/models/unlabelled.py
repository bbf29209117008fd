"""Losses in images that do not label all classes.

An object of an unlabelled class may be in the image, so no loss makes it less likely. `target["labelled"]` (C,) bool
holds the classes that an image labels.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def labelled_classes(targets: Sequence[Mapping], device: torch.device) -> Tensor | None:
    """Return the classes that each image labels, (B, C) bool; None: all images label all, and losses are unchanged."""
    if not any("labelled" in target for target in targets):
        return None
    return torch.stack([target["labelled"].to(device, non_blocking=True) for target in targets])


def without_unlabelled(terms: Tensor, positives: tuple[Tensor, ...], labelled: Tensor | None) -> Tensor:
    """Set sigmoid losses (L, B, Q, C) of unlabelled classes to 0, except at the indices `positives`."""
    if labelled is None:
        return terms
    counted = labelled[:, None].expand_as(terms).clone()
    counted[positives] = True
    return terms.where(counted, 0)


def unlabelled_columns(labelled: Tensor | None, background: int) -> Tensor | None:
    """Return the columns of a softmax that an image does not label, (B, C + 1) bool.

    background: its column, 0 or -1.
    """
    if labelled is None:
        return None
    always = labelled.new_zeros(len(labelled), 1)
    return torch.cat([always, ~labelled] if background == 0 else [~labelled, always], dim=1)


def partial_log_softmax(logits: Tensor, classes: Tensor, unlabelled: Tensor | None, background: int) -> Tensor:
    """Return log-probabilities (N, C + 1) whose `nll_loss` for `classes` (N,) pushes no unlabelled class down.

    If the background is the target, it counts together with all unlabelled classes, one of which may be there (Cermelli
    et al., Modeling the Background, CVPR 2020, equation 5). If a class is the target, unlabelled ones are left out of
    the softmax; their entries are then those of the background. Rows without unlabelled classes are not changed.

    Args:
        logits: (N, C + 1), or log-probabilities. unlabelled: (N, C + 1), see `unlabelled_columns`; None: all are
            labelled.
        background: column of the background, 0 or -1.
    """
    if unlabelled is None:
        return logits.log_softmax(1)
    is_background = torch.arange(logits.shape[1], device=logits.device) == background % logits.shape[1]
    wanted = classes[:, None] == torch.arange(logits.shape[1], device=logits.device)
    unknown = unlabelled & ~wanted
    known = logits.masked_fill(unknown, -torch.inf).log_softmax(1)
    known = known.where(~unknown, known[:, background, None])
    nothing = logits.masked_fill(~(unlabelled | is_background), -torch.inf).logsumexp(1) - logits.logsumexp(1)
    partial = torch.where((wanted & is_background).any(1, keepdim=True), nothing[:, None], known)
    return torch.where(unlabelled.any(1, keepdim=True), partial, logits.log_softmax(1))
