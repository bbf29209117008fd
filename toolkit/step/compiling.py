"""torch.compile in place, which keeps the names of the state dict; deterministic algorithms."""

import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator

import torch
from torch import nn

from toolkit.base.errors import BadInput

_NO_DETERMINISTIC = re.compile(r"^(\S+) does not have a deterministic implementation")
VARIANTS = 64  # of one block: its widths, with and without gradients, sizes of images; torch would give up after 8


def compile_in_place(module: nn.Module, compile: bool | str) -> None:
    """Compiles the repeated blocks of `module`, or all of it without such, at the next call; keeps state-dict names.

    Blocks of one class and width share their code, so that compiling takes as long as one of each would.

    Args:
        compile: False: leaves it alone; True: torch's own backend; a name: that backend, such as "aot_eager", which
            compiles no kernels and so shows what is captured.

    Raises:
        BadInput: torch has no such backend.
    """
    if not compile:
        return
    backend = "inductor" if compile is True else compile
    backends = torch.compiler.list_backends(exclude_tags=())
    if backend not in backends:
        raise BadInput(f"optim.compile: torch has no backend {backend!r}; give true, or one of {', '.join(backends)}")
    import torch._inductor.config as inductor  # here: it takes a second

    torch._dynamo.config.recompile_limit = VARIANTS
    inductor.fallback_random = True  # dropout draws what it draws uncompiled
    for block in list(repeated_blocks(module)) or [module]:
        block.compile(backend=backend)


def repeated_blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules that stand in a list or sequence with another of their class, such as the layers of a
    transformer; plain layers are none."""
    in_row = isinstance(module, nn.ModuleList | nn.Sequential)
    kinds = Counter(map(type, module.children())) if in_row else {}
    for child in module.children():
        if in_row and kinds[type(child)] > 1 and any(True for _ in child.children()):
            yield child
        else:
            yield from repeated_blocks(child)


class GraphCount:
    """Counts the graphs of torch.compile in this process; growth in mid-training means that shapes keep changing."""

    def __init__(self):
        self.seen = 0

    def news(self, step: int) -> str:
        """A message about the graphs compiled since the last call; empty if there are none."""
        dynamo = sys.modules.get("torch._dynamo.utils")  # not imported where nothing is compiled
        graphs = dynamo.counters["stats"]["unique_graphs"] if dynamo is not None else 0
        made, again, self.seen = graphs - self.seen, self.seen > 0, graphs
        if made == 0:
            return ""
        reason = ": shapes or settings that it relied on have changed" if again else ""
        breaks = sum(dynamo.counters["graph_break"].values())
        more = "more " if again else ""
        return f"torch.compile: {made} {more}graphs up to step {step}, {graphs} in all, {breaks} graph breaks{reason}"


def be_deterministic() -> None:
    """Switches deterministic algorithms on and names, once each, the operations that have none when they are met.

    On CPU two runs are equal to the bit without this too; on a GPU atomic additions (scatter, grid_sample backward) are
    what it is for.
    """
    met: set[str] = set()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    show = warnings.showwarning

    def name_once(message, category, filename, lineno, file=None, line=None):
        match = _NO_DETERMINISTIC.match(str(message))
        if match is None:
            show(message, category, filename, lineno, file, line)
        elif match[1] not in met:
            met.add(match[1])
            print(f"stays non-deterministic: {match[1]}", flush=True)

    warnings.showwarning = name_once
