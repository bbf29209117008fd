"""Why a training ended.

The cause is the name of a setting, such as "run.max_minutes": `Training.ended_by` determines it, `status.json` stores
it, and the report reads it from there.
"""

from collections.abc import Sequence

ENDINGS = {
    "run.epochs": "all epochs are over",
    "run.max_steps": "all steps are made",
    "run.max_minutes": "the minutes are used up",
    "eval.early_stopping_patience": "so many evaluations in a row were not better than the best one",
    "schedule.max_decays": "the learning rate has fallen so many times",
}


def in_words(ended_by: Sequence[str]) -> str:
    """"training ended by run.max_minutes (the minutes are used up)"; empty when nothing has ended it."""
    named = [f"{key} ({ENDINGS[key]})" if key in ENDINGS else str(key) for key in ended_by]
    return f"training ended by {' and '.join(named)}" if named else ""
