"""Types of settings with a range: what lies outside is refused where it is parsed, wherever the setting is given.

Each type has `fits`, which says whether a value is inside, and `words`, which describes its values in a sentence. A
value becomes a plain `int`, `float` or `str`: checkpoints, which hold settings, may hold no other types.
"""

import re
from collections.abc import Callable


def _ranged(name: str, kind: type, words: str, fits: Callable[..., bool]) -> type:
    return type(name, (kind,), {"words": words, "fits": staticmethod(fits), "__doc__": f"Of settings: {words}."})


PositiveInt = _ranged("PositiveInt", int, "a whole number above 0", lambda number: number > 0)
NonNegativeInt = _ranged("NonNegativeInt", int, "a whole number of at least 0", lambda number: number >= 0)
PositiveFloat = _ranged("PositiveFloat", float, "a number above 0", lambda number: number > 0)
NonNegativeFloat = _ranged("NonNegativeFloat", float, "a number of at least 0", lambda number: number >= 0)
ClosedUnitInterval = _ranged("ClosedUnitInterval", float, "a number from 0 to 1", lambda number: 0 <= number <= 1)

# Of layers, threads and processes, which are made one by one: a larger number would take hours, or the machine.
FewInt = _ranged("FewInt", int, "a whole number from 1 to 1000", lambda number: 1 <= number <= 1000)
FewOrNoneInt = _ranged("FewOrNoneInt", int, "a whole number from 0 to 1000", lambda number: 0 <= number <= 1000)
# Of epochs, whose steps are counted one by one.
EpochsInt = _ranged("EpochsInt", int, "a whole number from 1 to 1,000,000", lambda number: 1 <= number <= 1_000_000)
# Of channels and queries, whose squares are allocated.
WidthInt = _ranged("WidthInt", int, "a whole number from 1 to 100,000", lambda number: 1 <= number <= 100_000)
WidthOrNoneInt = _ranged(
    "WidthOrNoneInt", int, "a whole number from 0 to 100,000", lambda number: 0 <= number <= 100_000
)
# At most 19 years.
Minutes = _ranged("Minutes", float, "a number above 0, at most 10,000,000", lambda number: 0 < number <= 10_000_000)
Multiple = _ranged("Multiple", float, "a number from 0.01 to 100", lambda number: 0.01 <= number <= 100)
Decay = _ranged("Decay", float, "a number above 0, at most 1", lambda number: 0 < number <= 1)
Magnification = _ranged("Magnification", float, "a number from 1 to 100", lambda number: 1 <= number <= 100)
ShareOfTile = _ranged("ShareOfTile", float, "a number from 0 to 0.9", lambda number: 0 <= number <= 0.9)
MovingAverage = _ranged("MovingAverage", float, "a number of at least 0 and below 1", lambda number: 0 <= number < 1)


def _is_time(text: str) -> bool:
    """Return whether `toolkit.step.schedules.steps_from` can read a text."""
    return re.fullmatch(r"\s*(\d+\s*(steps?)?|\d+(\.\d+)?\s*epochs?)\s*", text) is not None


Time = _ranged("Time", str, 'a number of steps or epochs such as "2 epochs"', _is_time)
