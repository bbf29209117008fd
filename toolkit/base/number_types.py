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

Layers = restricted_number_type("Layers", int, [(">=", 1), ("<=", 1000)])
LayersOrNone = restricted_number_type("LayersOrNone", int, [(">=", 0), ("<=", 1000)])
Threads = restricted_number_type("Threads", int, [(">=", 1), ("<=", 1024)])
Minutes = restricted_number_type("Minutes", float, [(">", 0), ("<=", 10_000_000)])  # 19 years
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
    Layers: "a whole number from 1 to 1000",
    LayersOrNone: "a whole number from 0 to 1000",
    Threads: "a whole number from 1 to 1024",
    Minutes: "a number above 0, at most 10,000,000",
    Magnification: "a number from 1 to 100",
    ShareOfTile: "a number from 0 to 0.9",
    MovingAverage: "a number of at least 0 and below 1",
    Time: 'a number of steps or epochs such as "2 epochs"',
}
