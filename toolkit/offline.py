"""The Hugging Face hub, from which trained weights come, where it cannot be reached."""

import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub import constants

PROBE_S = 5.0


@contextmanager
def cached_when_offline() -> Iterator[None]:
    """Inside, packages that load from the hub use their cache, and fail at once without it, if the hub does not answer.

    Left to themselves they try every file six times, half a minute each, with a warning every time.
    """
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or not hub_answers()
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def hub_answers() -> bool:
    """Whether the hub can be reached."""
    try:
        urllib.request.urlopen(urllib.request.Request(constants.ENDPOINT, method="HEAD"), timeout=PROBE_S).close()
    except urllib.error.HTTPError:  # an answer, if not the wanted one
        return True
    except OSError:
        return False
    return True
