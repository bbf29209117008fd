"""Types of settings with a range: the parser refuses what lies outside, wherever the setting is given.

Those without words here, such as `PositiveInt`, are jsonargparse's own.
"""

from jsonargparse.typing import (
    ClosedUnitInterval,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    restricted_number_type,
    restricted_string_type,
)

# Of layers, threads and processes, which are made one by one: a larger number would take hours, or the machine.
FewInt = restricted_number_type("FewInt", int, [(">=", 1), ("<=", 1000)])
FewOrNoneInt = restricted_number_type("FewOrNoneInt", int, [(">=", 0), ("<=", 1000)])
# Of channels and queries, whose squares are allocated.
WidthInt = restricted_number_type("WidthInt", int, [(">=", 1), ("<=", 100_000)])
WidthOrNoneInt = restricted_number_type("WidthOrNoneInt", int, [(">=", 0), ("<=", 100_000)])
Minutes = restricted_number_type("Minutes", float, [(">", 0), ("<=", 10_000_000)])  # 19 years
Multiple = restricted_number_type("Multiple", float, [(">=", 0.01), ("<=", 100)])
Decay = restricted_number_type("Decay", float, [(">", 0), ("<=", 1)])
Magnification = restricted_number_type("Magnification", float, [(">=", 1), ("<=", 100)])
ShareOfTile = restricted_number_type("ShareOfTile", float, [(">=", 0), ("<=", 0.9)])
MovingAverage = restricted_number_type("MovingAverage", float, [(">=", 0), ("<", 1)])
# What `toolkit.step.schedules.steps_from` reads.
Time = restricted_string_type("Time", r"\s*(\d+\s*(steps?)?|\d+(\.\d+)?\s*epochs?)\s*$")

WORDS = {
    PositiveInt: "a whole number above 0",
    NonNegativeInt: "a whole number of at least 0",
    PositiveFloat: "a number above 0",
    NonNegativeFloat: "a number of at least 0",
    ClosedUnitInterval: "a number from 0 to 1",
    FewInt: "a whole number from 1 to 1000",
    FewOrNoneInt: "a whole number from 0 to 1000",
    WidthInt: "a whole number from 1 to 100,000",
    WidthOrNoneInt: "a whole number from 0 to 100,000",
    Minutes: "a number above 0, at most 10,000,000",
    Multiple: "a number from 0.01 to 100",
    Decay: "a number above 0, at most 1",
    Magnification: "a number from 1 to 100",
    ShareOfTile: "a number from 0 to 0.9",
    MovingAverage: "a number of at least 0 and below 1",
    Time: 'a number of steps or epochs such as "2 epochs"',
}
