"""torch.compile, in place: the names of a state dict stay as they are."""

import sys

import torch
from torch import nn

from toolkit.errors import BadInput


def compile_in_place(module: nn.Module, compile: bool | str) -> None:
    """Compiles `module` from its next call on; its parameters keep their names.

    compile: False: leaves it alone; True: torch's own backend; a name: that backend, such as "aot_eager", which
        compiles no kernels and so shows what is captured.

    Raises:
        BadInput: torch has no such backend.
    """
    if not compile:
        return
    backend = "inductor" if compile is True else compile
    known = torch.compiler.list_backends(exclude_tags=())
    if backend not in known:
        raise BadInput(f"optim.compile: torch has no backend {backend!r}; give true, or one of {', '.join(known)}")
    module.compile(backend=backend)


class GraphCount:
    """Graphs that torch.compile made in this process; growth in mid-training means that shapes keep changing."""

    def __init__(self):
        self.seen = 0

    def news(self, step: int) -> str:
        """What to say at an optimizer step about the graphs made since the last time; empty when there are none."""
        dynamo = sys.modules.get("torch._dynamo.utils")  # not imported where nothing is compiled
        graphs = dynamo.counters["stats"]["unique_graphs"] if dynamo is not None else 0
        made, again, self.seen = graphs - self.seen, self.seen > 0, graphs
        if made == 0:
            return ""
        reason = ": shapes or settings that it relied on have changed" if again else ""
        return f"torch.compile: {made} {'more ' if again else ''}graphs up to step {step}, {graphs} in all{reason}"
