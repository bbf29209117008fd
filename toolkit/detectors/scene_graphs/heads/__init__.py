"""Relation heads by name. A relation head predicts the predicates between the objects of an image."""

from torch import Tensor, nn

from toolkit.base.errors import BadInput
from toolkit.detectors.scene_graphs.frequency import FrequencyHead
from toolkit.detectors.scene_graphs.heads.causal import CausalHead
from toolkit.detectors.scene_graphs.heads.imp import IMPHead
from toolkit.detectors.scene_graphs.heads.layers import HeadSizes
from toolkit.detectors.scene_graphs.heads.motifs import MotifsHead
from toolkit.detectors.scene_graphs.heads.prototypes import PrototypeHead
from toolkit.detectors.scene_graphs.heads.react_pp import ReactPlusPlusHead
from toolkit.detectors.scene_graphs.heads.squat import SquatHead
from toolkit.detectors.scene_graphs.heads.transformer import TransformerHead
from toolkit.detectors.scene_graphs.heads.vctree import VCTreeHead

RELATION_HEADS = (
    "frequency", "imp", "motifs", "vctree", "transformer", "vtranse", "causal", "penet", "react", "react_pp", "squat"
)  # fmt: skip


def build_relation_head(name: str, mode: str, sizes: HeadSizes, log_frequency: Tensor, **options) -> nn.Module:
    """Build the relation head of this name.

    All heads convert a RelationBatch to a RelationOutput, and have `loss_names` and `of_labels`, the names of the parts
    that only classify the objects. `vtranse` is the causal head with the VTransE context and without an effect; `react`
    is a `penet` that keeps the detector's labels.

    Args:
        mode: predcls, sgcls or sgdet.
        log_frequency: (C, C, P) for C classes and P predicates, see `log_frequencies`.
        options: arguments of the constructor of the head.

    Raises:
        BadInput: the name is unknown.
    """
    if name == "frequency":
        return FrequencyHead(mode, log_frequency)
    if name == "imp":
        return IMPHead(mode, sizes, **options)
    if name == "vtranse":
        return CausalHead(mode, sizes, log_frequency, context="vtranse", **options)
    if name in ("penet", "react"):
        fast = {"refine_objects": False, "join": "linear"} if name == "react" else {}
        return PrototypeHead(mode, sizes, **fast | options)
    if name == "react_pp":
        return ReactPlusPlusHead(mode, sizes, **options)
    heads = {
        "motifs": MotifsHead,
        "vctree": VCTreeHead,
        "transformer": TransformerHead,
        "causal": CausalHead,
        "squat": SquatHead,
    }
    if name not in heads:
        raise BadInput(f"relation head is {name!r}; expected one of {', '.join(RELATION_HEADS)}")
    return heads[name](mode, sizes, log_frequency, **options)
