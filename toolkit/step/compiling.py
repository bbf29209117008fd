"""Compilation by torch.compile in place, which keeps the names of the state dict; deterministic algorithms."""

import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator

import torch
from torch import nn

from toolkit.base.errors import BadInput

_NO_DETERMINISTIC = re.compile(r"^(\S+) does not have a deterministic implementation")
VARIANTS = 64  # graphs of one block: widths, with and without gradients, image sizes; torch would stop after 8


def compile_in_place(module: nn.Module, compile: bool | str) -> None:
    """Compile the repeated blocks of `module`, or all of it if it has none, at the next call; keep state-dict names.

    Blocks of one class and width share their code, so that compiling takes as long as one of each would.

    Args:
        compile: False: nothing is compiled; True: torch's own backend; a name: that backend, such as "aot_eager", which
            compiles no kernels and so shows the captured graphs.

    Raises:
        BadInput: torch does not have the backend.
    """
    if not compile:
        return
    backend = "inductor" if compile is True else compile
    backends = torch.compiler.list_backends(exclude_tags=())
    if backend not in backends:
        raise BadInput(f"optim.compile: torch has no backend {backend!r}; give true, or one of {', '.join(backends)}")
    import torch._inductor.config as inductor  # here: it takes a second

    torch._dynamo.config.recompile_limit = VARIANTS
    inductor.fallback_random = True  # dropout draws the same numbers as without compilation
    for block in list(repeated_blocks(module)) or [module]:
        block.compile(backend=backend)


def repeated_blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost modules that are in a list or sequence with another of their class.

    Examples are the layers of a transformer. Modules without children, such as a convolution, are not yielded.
    """
    in_row = isinstance(module, nn.ModuleList | nn.Sequential)
    kinds = Counter(map(type, module.children())) if in_row else {}
    for child in module.children():
        if in_row and kinds[type(child)] > 1 and any(True for _ in child.children()):
            yield child
        else:
            yield from repeated_blocks(child)


class GraphCount:
    """A counter of the graphs of torch.compile in this process.

    Growth in mid-training means that shapes keep changing.
    """

    def __init__(self):
        self.seen = 0

    def news(self, step: int) -> str:
        """Return a message about the graphs compiled since the last call; empty if there are none."""
        dynamo = sys.modules.get("torch._dynamo.utils")  # not imported where nothing is compiled
        graphs = dynamo.counters["stats"]["unique_graphs"] if dynamo is not None else 0
        made = graphs - self.seen
        again = self.seen > 0
        self.seen = graphs
        if made == 0:
            return ""
        reason = ": shapes or settings that it relied on have changed" if again else ""
        breaks = sum(dynamo.counters["graph_break"].values())
        more = "more " if again else ""
        return f"torch.compile: {made} {more}graphs up to step {step}, {graphs} in all, {breaks} graph breaks{reason}"


def be_deterministic() -> None:
    """Switch deterministic algorithms on, and print each operation that has none, once, when it is first used.

    On a CPU two runs are bitwise equal without this too; on a GPU it replaces atomic additions (scatter, grid_sample
    backward).
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
