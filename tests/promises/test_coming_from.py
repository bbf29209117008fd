"""The originals' published commands as docs/coming_from/ translates them: every value is the one they ran with."""

import importlib
import re
import sys
from dataclasses import asdict
from functools import reduce

import pytest
import yaml
from places import ASSETS, ROOT
from shown_commands import shown_commands

from toolkit.models import build_detector
from toolkit.run.command_line import parse_config
from toolkit.step.freezing import freeze_prefixes

ORIGINALS = yaml.safe_load((ASSETS / "originals.yaml").read_text())
OPTIMIZERS = ORIGINALS.pop("optimizers")


def values_of(page: str) -> list[dict]:
    """The values of each command of a page; some are those of another one but for a few."""
    commands = []
    for given in ORIGINALS[page]:
        values = commands[given["like"]] | given if "like" in given else given
        commands.append({key: value for key, value in values.items() if key != "like"})
    return commands


def translated(page: str):
    """The training commands of a page."""
    path = f"docs/coming_from/{page}.md"
    return [command for command in shown_commands() if path in command.files and command.trains]


def script(name: str):
    sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]  # one finds its helpers beside itself
    try:
        return importlib.import_module(f"scripts.{name}")
    finally:
        del sys.path[:2]


def settings_of(command, *further: str):
    module = script(command.script)
    words = [str(ROOT / word) if word.startswith("configs/") else word for word in (*command.arguments, *further)]
    return parse_config(module.Config, words, module.DEFAULT_CONFIG)


CASES = [(page, number) for page in ORIGINALS for number in range(len(ORIGINALS[page]))]


@pytest.mark.parametrize(("page", "number"), CASES)
def test_a_translated_command_has_the_originals_values(page, number):
    commands = translated(page)
    assert len(commands) == len(ORIGINALS[page])
    document = asdict(settings_of(commands[number]))
    expected = values_of(page)[number]
    ours = {key: reduce(dict.__getitem__, key.split("."), document) for key in expected}
    assert ours == expected


def test_published_scales_and_frozen_stages_of_seamless():
    """num_frozen is 2, bn_frozen no."""
    found = settings_of(translated("seamseg")[0])
    assert (min(found.data.scales), max(found.data.scales), found.data.scales[-1]) == (512, 2048, 1024)
    detector = build_detector(class_names=["a"], **asdict(found.model) | {"pretrained_backbone": False})
    assert all(parameter.requires_grad for parameter in detector.parameters())
    frozen = freeze_prefixes(detector, found.model.freeze_prefixes)
    assert {name.split(".")[2] for name in frozen} == {"conv1", "bn1", "layer1"}


def test_published_rates_of_the_schedule_of_cvnets():
    found = settings_of(translated("cvnets")[0])
    assert found.optim.lr * found.schedule.warmup_factor == pytest.approx(0.00009)
    assert found.optim.lr * found.schedule.final_factor == pytest.approx(1e-6, rel=1e-4)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_script_without_settings_has_its_originals_optimizer(name):
    found = parse_config(script(f"train_{name}").Config, [])
    assert OPTIMIZERS[name].items() <= (vars(found.optim) | {"betas": list(found.optim.betas)}).items()
    assert found.schedule.power == (2.0 if name == "yolov3" else 0.9)


@pytest.mark.parametrize("page", ORIGINALS)
def test_the_page_of_each_original_says_which_optimizer_and_what_is_clipped(page):
    text = (ROOT / "docs" / "coming_from" / f"{page}.md").read_text()
    assert re.search(r"`--optim\.name\b", text)
    assert re.search(r"`--optim\.max_norm\b", text)
