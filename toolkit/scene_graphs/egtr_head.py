"""The relation head of EGTR (Im et al., CVPR 2024): a graph from the self-attention of a DETR's decoder.

The self-attention of every decoder layer compares all queries with all keys. Predicates are predicted from those
queries and keys and from the last hidden states: no box is pooled, no pair is sampled. Source: the paper's section 3
and naver-ai/egtr `model/egtr.py`. There every pair holds its layers' features side by side; here they are summed as
two products of matrices, which gives the same numbers with 1 / (layers + 1) of the memory.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

SMALLEST_SHARE = 1e-12  # of a predicate that training had not, in the table of frequencies


class DecoderStates:
    """What a decoder said of its queries: `queries`, `keys`, one (B, Q, D) of each layer, and `last` (B, Q, D)."""

    def __init__(self, layers: Sequence[nn.Module]):
        self.layers = layers
        self.queries: list[Tensor] = []
        self.keys: list[Tensor] = []
        self.last: Tensor | None = None

    def of_last(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys (B, count, L, D) and last states (B, count, D) of the last `count` queries, those that
        detect: queries of denoising come before them."""
        queries, keys = (torch.stack([each[:, -count:] for each in of], 2) for of in (self.queries, self.keys))
        return queries, keys, self.last[:, -count:]


@contextmanager
def kept_states(layers: Sequence[nn.Module]) -> Iterator[DecoderStates]:
    """Filled while the detector runs inside. layers: of its decoder, with `self_attn.q_proj` and `k_proj`."""
    kept = DecoderStates(layers)

    def keep_last(_, arguments: tuple, output) -> None:
        kept.last = output[0] if isinstance(output, tuple) else output

    with ExitStack() as stack:
        for layer in layers:
            for part, to in ((layer.self_attn.q_proj, kept.queries), (layer.self_attn.k_proj, kept.keys)):
                stack.enter_context(part.register_forward_hook(lambda _, arguments, output, to=to: to.append(output)))
        stack.enter_context(layers[-1].register_forward_hook(keep_last))
        yield kept


class EgtrHead(nn.Module):
    """Predicates, and whether there is any, of all ordered pairs of queries.

    Args:
        width: D of the decoder. num_layers: L of it. num_classes, num_predicates: without background.
        frequency_bias: add how often training had each predicate between the classes of the two.
    """

    def __init__(self, width: int, num_layers: int, num_classes: int, num_predicates: int, frequency_bias: bool = True):
        super().__init__()
        self.query_projections = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers))
        self.key_projections = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers))
        self.subject, self.object = nn.Linear(width, width), nn.Linear(width, width)
        self.gate = nn.Linear(2 * width, 1)
        self.predicate, self.connectivity = _mlp(width, num_predicates), _mlp(width, 1)
        table = torch.zeros(num_classes, num_classes, num_predicates) if frequency_bias else None
        self.register_buffer("log_frequency", table)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)  # the original's N(0, 0.02) fades in narrow decoders
                nn.init.zeros_(module.bias)

    @torch.no_grad()
    def start_from(self, counts: Tensor) -> None:
        """Sets the table of frequencies from (C, C, P) counts of training relations, without background.

        As in the original it is the logarithm of the count, of a predicate that two classes never had that of a share
        of 1e-12, and 0 for classes that never had any: the head learns on top of it.
        """
        if self.log_frequency is not None:
            counts = counts.double()
            smallest = SMALLEST_SHARE / (counts.sum(2, keepdim=True) + SMALLEST_SHARE)
            self.log_frequency.copy_((counts + smallest).log())

    def forward(self, queries: Tensor, keys: Tensor, states: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of the predicates (B, Q, Q, P) and of any relation (B, Q, Q), subjects first.

        Args:
            queries, keys: (B, Q, L, D) of the decoder's self-attention, before they are scaled.
            states: (B, Q, D) of the last layer. labels: (B, Q) class from 0 that is likeliest.
        """
        subjects = self._sources(queries, self.query_projections, self.subject(states))
        objects = self._sources(keys, self.key_projections, self.object(states))
        of_subject, of_object = self.gate.weight[0].chunk(2)
        gate = (subjects @ of_subject)[:, :, None] + (objects @ of_object)[:, None] + self.gate.bias
        gate = gate.sigmoid()  # (B, Q, Q, L + 1)
        pairs = torch.cat([gate @ subjects, (gate.transpose(1, 2) @ objects).transpose(1, 2)], -1)  # (B, Q, Q, 2 D)
        predicates = self.predicate(pairs)
        if self.log_frequency is not None:
            predicates = predicates + self.log_frequency[labels[:, :, None], labels[:, None]]
        return predicates, self.connectivity(pairs)[..., 0]

    @staticmethod
    def _sources(of_layers: Tensor, projections: nn.ModuleList, of_states: Tensor) -> Tensor:
        """(B, Q, L + 1, D)."""
        parts = [projection(part) for projection, part in zip(projections, of_layers.unbind(2), strict=True)]
        return torch.stack([*parts, of_states], 2)


def _mlp(width: int, out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(2 * width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, out)
    )
