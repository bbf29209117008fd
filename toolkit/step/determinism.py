"""Deterministic algorithms; operations that have none are reported."""

import re
import warnings

import torch

_NO_DETERMINISTIC = re.compile(r"^(\S+) does not have a deterministic implementation")


def be_deterministic() -> set[str]:
    """Switches deterministic algorithms on and names, in one warning each, the operations that stay otherwise.

    Returns:
        The set of operation names met so far; it grows while the run goes on. On CPU two runs are equal to the bit
        without this too; on a GPU atomic additions (scatter, grid_sample backward) are what it is for.
    """
    met: set[str] = set()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    show = warnings.showwarning

    def name_once(message, category, filename, lineno, file=None, line=None):
        found = _NO_DETERMINISTIC.match(str(message))
        if found is None:
            return show(message, category, filename, lineno, file, line)
        if found[1] not in met:
            met.add(found[1])
            print(f"stays non-deterministic: {found[1]}", flush=True)
        return None

    warnings.showwarning = name_once
    return met
