"""Relations of a mirrored image: "left of" becomes "right of"."""

import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from toolkit.errors import BadInput

OTHER_SIDE = {"left": "right", "right": "left", "leftmost": "rightmost", "rightmost": "leftmost"}
UNKNOWN = -1


def mirrored_predicates(names: Sequence[str], pairs: Mapping[str, str] | None = None) -> Tensor:
    """(P,) int64: which predicate each becomes in a mirrored picture; `UNKNOWN`: there is no name for it.

    A name that says left or right becomes the one that says the other side; all others stay.

    Args:
        names: of the predicates, in the order of their labels.
        pairs: what further ones become, such as {"west of": "east of"}, and back.

    Raises:
        BadInput: pairs of names that are none.
    """
    pairs = dict(pairs or {})
    if strange := sorted({*pairs, *pairs.values()} - set(names)):
        raise BadInput(f"data.mirrored_predicates: {', '.join(strange)}: no predicates of the data, which has "
                       f"{', '.join(names)}")  # fmt: skip
    pairs |= {other: name for name, other in pairs.items()}
    rows = {name: row for row, name in enumerate(names)}
    wanted = (pairs.get(name) or re.sub(r"[A-Za-z]+", _other_side, name) for name in names)
    return torch.tensor([rows.get(name, UNKNOWN) for name in wanted], dtype=torch.int64)


def mirrored_relations(relations: Tensor, mirrored: Tensor) -> Tensor | None:
    """(R, 3) subject, object, predicate as they are in the mirrored picture; None: one of them has no name there."""
    predicates = mirrored[relations[:, 2]]
    if (predicates == UNKNOWN).any():
        return None
    return torch.cat([relations[:, :2], predicates[:, None]], dim=1)


def _other_side(word: re.Match) -> str:
    return OTHER_SIDE.get(word[0], word[0])
