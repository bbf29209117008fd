"""The kinds of values in a checkpoint's state.json, and a sentence for every value of another kind.

The hash of a file says that it is as it was written, not that a run can go on from it. A number of the wrong kind would
be found in the middle of a later step, or never.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from toolkit.base.text import shown
from toolkit.step.ema import UPDATES
from toolkit.step.schedules import SHAPES

LARGEST = 2**53  # of a count: further whole numbers are none of a float
LARGEST_SEED = 2**64


class Kind(NamedTuple):
    """words: what is expected, for messages. fits: whether a value is that."""

    words: str
    fits: Callable[[object], bool]


@dataclass(frozen=True)
class Each:
    """A list or a mapping (`kind`), each of whose values is as `of` says. size: number of values; None: any."""

    kind: type
    of: Any
    size: int | None = None


@dataclass(frozen=True)
class Keys:
    """A mapping with these keys. A value of any other key may be anything.

    needed: keys that must be there. known: keys that may be there.
    """

    needed: Mapping[str, Any]
    known: Mapping[str, Any]


@dataclass(frozen=True)
class OrNull:
    """Null, or as `of` says."""

    of: Any


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, float) or _is_whole(value) and abs(value) <= LARGEST


def one_of(*values: str) -> Kind:
    """One of these texts."""
    return Kind(f"one of {', '.join(values)}", lambda value: isinstance(value, str) and value in values)


def whole(least: int, most: int = LARGEST) -> Kind:
    """A whole number of a range, its ends included."""
    return Kind(f"a whole number from {least}", lambda value: _is_whole(value) and least <= value <= most)


TEXT = Kind("a text", lambda value: isinstance(value, str))
TRUTH = Kind("true or false", lambda value: isinstance(value, bool))
# of a step -1: there is none yet
COUNT = whole(0)
POSITIVE = whole(1)
STEP = whole(-1)
NUMBER = Kind("a finite number", lambda value: _is_number(value) and math.isfinite(value))
DURATION = Kind("a number from 0", lambda value: _is_number(value) and 0 <= value < math.inf)
FACTOR = Kind("a number above 0", lambda value: _is_number(value) and 0 < value < math.inf)
ANY_NUMBER = Kind("a number", _is_number)  # of what was measured, which may be NaN
ID = Kind("a whole number or a text", lambda value: isinstance(value, str) or _is_whole(value) and abs(value) < 2**63)
TEXTS = Each(list, TEXT)

_METER = Keys({"fmt": TEXT}, {
    "window": Each(list, ANY_NUMBER), "window_size": OrNull(whole(0, 10**6)), "total": ANY_NUMBER,
    "momentum": ANY_NUMBER, "value": ANY_NUMBER, "sum": ANY_NUMBER, "count": ANY_NUMBER,
})  # fmt: skip
_SAMPLER = Keys({
    "seed": whole(-LARGEST_SEED, LARGEST_SEED), "epoch": COUNT, "offset": COUNT, "world_size": POSITIVE,
    "batch_size": POSITIVE, "num_samples": COUNT,
}, {"layout": Each(list, Each(list, COUNT, 3)), "sizes": TEXT})  # fmt: skip
_SCHEDULE_OPTIONS = Keys({}, {
    **dict.fromkeys(("gamma", "warmup_factor", "warmup_start", "power", "final_factor", "threshold"), NUMBER),
    **dict.fromkeys(("warmup_steps", "step_size", "cooldown"), DURATION),
    **dict.fromkeys(("every", "stairs", "cycles", "patience", "max_decays"), FACTOR),
    "warmup_method": one_of("linear", "constant"),
    "last_cycle": one_of("linear", "cosine"),
    "milestones": Each(list, NUMBER),
    "decayed": Each(list, NUMBER, 2),
})  # fmt: skip
_SCHEDULE = Keys({}, {
    "name": one_of(*SHAPES), "total_steps": OrNull(DURATION), "scale": FACTOR, "options": _SCHEDULE_OPTIONS,
    "clock": Each(list, NUMBER, 3), "decays": COUNT, "best": OrNull(NUMBER), "bad": COUNT, "cooling": COUNT,
})  # fmt: skip
_BUDGET = Keys({}, {
    **dict.fromkeys(("total_steps", "planned_steps"), OrNull(COUNT)),
    **dict.fromkeys(("steps", "begun_steps"), OrNull(COUNT)),
    **dict.fromkeys(("elapsed_s", "planned_s", "begun_s"), OrNull(DURATION)),
    "measured_s": Each(list, DURATION), "settled": TRUTH,
})  # fmt: skip
_GUARD = Keys({}, dict.fromkeys(("skips", "calibrations", "rollbacks"), COUNT))
_SCALER = Keys({}, dict.fromkeys(("scale", "growth_factor", "backoff_factor", "growth_interval"), NUMBER))

_PLAN = Keys({
    "total_steps": COUNT,
    "limit": TEXT,
    "accumulation": Each(list, COUNT, 2),
    "recut": NUMBER,
    "schedule": _SCHEDULE,
    "budget": OrNull(_BUDGET),
}, {"without_own_rates": OrNull(COUNT)})  # fmt: skip
_LOG = Keys({
    "meters": Each(dict, _METER),
    "averages": Each(dict, Each(list, ANY_NUMBER, 2)),
    "elapsed_s": DURATION,
    "epoch_s": DURATION,
    "epoch_steps": COUNT,
    "logged_epoch": STEP,
    "logged_steps": STEP,
    "has_notes": TRUTH,
    "writer": Keys({"rows": COUNT, "run_ids": Each(dict, OrNull(ID))}, {}),
}, {})  # fmt: skip
_BEST = Keys({
    "metric": TEXT,
    "value": OrNull(NUMBER),
    "step": STEP,
    "without_better": COUNT,
    "evaluated_step": STEP,
}, {})  # fmt: skip
_PARTS = Keys(
    {"sampler": _SAMPLER, "plan": _PLAN, "guard": _GUARD, "log": _LOG, "best": _BEST},
    {"scaler": _SCALER, "ema": Keys({UPDATES: COUNT}, {})},
)

# All that a run needs to go on: what it is, and the plain values in the state of its parts.
RUN_STATE = Keys({
    "step": COUNT,
    "categories": Each(list, Keys({"id": ID, "name": TEXT}, {})),
    "infinite": TEXTS,
    "frozen": TEXTS,
    "parts": _PARTS,
}, {
    "predicates": TEXTS,
    "attributes": TEXTS,
    "data": Each(dict, Keys({}, {"fingerprint": TEXT, "file": TEXT, "images": COUNT, "boxes": COUNT})),
})  # fmt: skip


def faults_of(value: object, expected: Any, where: str = "") -> Iterator[str]:
    """One sentence for each place of `value` that is not as `expected` says.

    expected: a `Kind`, `Each`, `Keys` or `OrNull`. where: the keys that lead to the value, joined by dots.
    """
    if isinstance(expected, OrNull):
        if value is not None:
            yield from faults_of(value, expected.of, where)
        return
    if isinstance(expected, Kind):
        if not expected.fits(value):
            yield _other(value, expected.words, where)
        return
    kind = expected.kind if isinstance(expected, Each) else dict
    size = getattr(expected, "size", None)
    if not isinstance(value, kind) or size is not None and len(value) != size:
        words = "a mapping" if kind is dict else "a list"
        yield _other(value, words if size is None else f"{words} of {size}", where)
        return
    if isinstance(expected, Keys):
        for key, of_key in (*expected.needed.items(), *expected.known.items()):
            if key in value:
                yield from faults_of(value[key], of_key, f"{where}.{key}".removeprefix("."))
            elif key in expected.needed:
                yield f"state.json has no {where}.{key}".replace(" .", " ")
        return
    for key, item in value.items() if kind is dict else enumerate(value):
        yield from faults_of(item, expected.of, f"{where}.{shown(key, 40)}")


def _other(value: object, words: str, where: str) -> str:
    if isinstance(value, int) and abs(value) > LARGEST_SEED:
        return f"{where} in state.json is a whole number beyond all bounds; expected {words}"
    return f"{where or 'all'} in state.json is {str(value)[:60]!r}; expected {words}"
