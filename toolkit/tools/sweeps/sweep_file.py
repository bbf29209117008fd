"""Reads a sweep file in W&B's format (docs.wandb.ai/models/sweeps): the search space and the metric to optimise."""

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from toolkit.base.errors import BadInput
from toolkit.base.files import read_yaml

METHODS = ("grid", "random", "bayes")
DISTRIBUTIONS = "constant categorical uniform int_uniform q_uniform log_uniform_values q_log_uniform_values".split()
SWEEP_KEYS = {
    "name",
    "description",
    "program",
    "command",
    "method",
    "metric",
    "parameters",
    "early_terminate",
    "run_cap",
}
KEY_TYPES = {
    "program": (str, "the path of a script"),
    "command": (list, "a list of words"),
    "parameters": (dict, "a mapping of settings"),
    "early_terminate": (dict, "a mapping with min_iter"),
    "run_cap": (int, "a whole number"),
    "early_terminate.min_iter": (int, "a whole number"),
}
COMMAND = ("${env}", "${interpreter}", "${program}", "${args}")


@dataclass(frozen=True)
class Parameter:
    """The search space of a setting.

    Attributes:
        values: the values to try; None: numbers from `low` to `high`.
        is_int: only whole numbers.
        log: numbers are drawn on a logarithmic scale.
        q: numbers are rounded to multiples of this; None: they are not.
    """

    values: list | None = None
    low: float = 0.0
    high: float = 0.0
    is_int: bool = False
    log: bool = False
    q: float | None = None


@dataclass(frozen=True)
class Sweep:
    """The content of a sweep file.

    Attributes:
        program: path of the training script.
        method: "grid", "random" or "bayes".
        metric: the key of the evaluation rows to optimise, such as "val/bbox_AP".
        maximize: whether larger values of the metric are better.
        parameters: search space of each setting, by its key.
        command: the words of the command of a trial, with W&B's placeholders such as "${args}".
        min_evaluations: number of evaluations after which a bad trial may be stopped early; None: no trial is.
        trials: maximum number of trials; None: no maximum.
    """

    program: str
    method: str
    metric: str
    maximize: bool
    parameters: dict[str, Parameter]
    command: tuple[str, ...]
    min_evaluations: int | None = None
    trials: int | None = None

    def command_of(self, values: Mapping, extra: list[str]) -> list[str]:
        """Return the command of a trial, as words.

        Args:
            values: values of the settings by key.
            extra: further arguments, which come last and override the values.
        """
        arguments = [*(f"--{name}={_word(value)}" for name, value in values.items()), *extra]
        meant = {
            "${env}": [],
            "${interpreter}": [sys.executable],
            "${program}": [self.program],
            "${args}": arguments,
        }
        return [part for word in self.command for part in meant.get(word, [word])]


def read_sweep(path: Path) -> Sweep:
    """Read a sweep file. Raises BadInput if it is not valid; the message lists all faults."""
    content = read_yaml(path, str(path))
    if not isinstance(content, dict):
        raise BadInput(f"{path}: expected a mapping with program, method, metric and parameters")
    problems = [
        f"no such key {key}; there are {', '.join(sorted(SWEEP_KEYS))}" for key in content if key not in SWEEP_KEYS
    ]
    min_iter = _mapping(content, "early_terminate").get("min_iter")
    values = content | {"early_terminate.min_iter": min_iter}
    problems += [
        f"{key} is {values[key]!r}; expected {expected}"
        for key, (kind, expected) in KEY_TYPES.items()
        if values.get(key) is not None and not isinstance(values[key], kind)
    ]
    problems += [f"{key} is missing" for key in ("program", "method", "metric", "parameters") if key not in content]
    if str(content.get("method", "grid")) not in METHODS:
        problems.append(f"method is {content['method']!r}; expected one of {', '.join(METHODS)}")
    metric = content.get("metric", {})
    is_named = isinstance(metric, dict) and str(metric.get("name")).startswith("val/")
    if not is_named or metric.get("goal", "minimize") not in ("minimize", "maximize"):
        expected = "name: val/<metric of the evaluation>, goal: minimize or maximize"
        problems.append(f"metric is {metric!r}; expected {expected}")
    parameters = {}
    for name, spec in _mapping(content, "parameters").items():
        try:
            parameters[name] = _parameter(spec)
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            problems.append(f"parameters.{name}: {error}")
    if content.get("method") == "grid":
        problems += [f"parameters.{name}: a grid needs values" for name, p in parameters.items() if p.values is None]
    if problems:
        raise BadInput([f"{path}: {problem}" for problem in problems])
    prunes = content.get("early_terminate") is not None
    return Sweep(
        program=content["program"],
        method=content["method"],
        metric=metric["name"],
        maximize=metric.get("goal") == "maximize",
        parameters=parameters,
        command=tuple(content.get("command", COMMAND)),
        min_evaluations=(1 if min_iter is None else min_iter) if prunes else None,
        trials=content.get("run_cap"),
    )


def _mapping(content: Mapping, key: str) -> Mapping:
    return content[key] if isinstance(content.get(key), Mapping) else {}


def _parameter(spec: object) -> Parameter:
    if not isinstance(spec, dict):
        raise ValueError(f"{spec!r}; expected value, values, or min and max")
    if "value" in spec:
        return Parameter([spec["value"]])
    if "values" in spec:
        return Parameter(list(spec["values"]))
    low = spec["min"]
    high = spec["max"]
    ints = isinstance(low, int) and isinstance(high, int)
    kind = spec.get("distribution", "int_uniform" if ints else "uniform")
    if kind not in DISTRIBUTIONS[2:]:
        raise ValueError(f"distribution is {kind!r}; expected one of {', '.join(DISTRIBUTIONS)}")
    if not (math.isfinite(low) and math.isfinite(high) and low < high and (low > 0 or "log" not in kind)):
        expected = "two numbers, the first one smaller (on a logarithmic axis above 0)"
        raise ValueError(f"from {low} to {high}: expected {expected}")
    q = spec.get("q", 1.0) if "q_" in kind else None
    return Parameter(None, low, high, kind == "int_uniform", "log" in kind, q)


def _word(value: object) -> str:
    """Write a value as YAML that reads back the same."""
    return yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("...\n").strip()
