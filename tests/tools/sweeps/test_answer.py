"""The page of a choice: the winner, what is not decided, and how long it is worth training."""

import dataclasses
import re

import pytest
from pretended_training import PretendedRun

from toolkit.base.signals import StopSignals
from toolkit.tools.shapes import make_shapes
from toolkit.tools.sweeps import answer
from toolkit.tools.sweeps import choice as choices
from toolkit.tools.sweeps.answer import doublings_worth, expected, gain_of_doubling, licence_of, write_answer

SKILLS = {"poor": "0.2", "close": "0.74", "equal": "-0.85", "best": "1", "broken": "fail"}
MEASURED = {"PyTorch": 20.0, "ONNX": 30.0, "MB": 10.0, "training_MB": 900.0}


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """(the text of the answer, the page, the choice) by pretended trainings."""
    folder = tmp_path_factory.mktemp("choice")
    make_shapes(folder / "shapes", train_images=1, val_images=20, image_size=64)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(PretendedRun, "data", folder / "shapes")
        patched.setattr(choices, "WatchedRun", PretendedRun)
        patched.setattr(choices, "POLL_S", 0)
        patched.setattr(answer, "measure", lambda run, table: dict(MEASURED))
        commands = {name: ["scripts/train_ssd.py", skill] for name, skill in SKILLS.items()}
        asked = {"metric": "AP", "minutes": 2.0, "devices": 1}
        choice = choices.open_choice(folder / "out", asked, lambda: commands)
        choices.run_rounds(choice, [""], StopSignals(), print)
        text, file = write_answer(choice)
    return text, file.read_text(), choice


def test_the_answer_names_the_winner_and_what_is_not_decided(page):
    text, html, _ = page
    assert text.startswith("best: AP 0.")
    against = text.partition("Against equal, in the same minutes: ")[2].splitlines()[0]
    assert against.startswith("better by")
    assert against.endswith("may be chance, so this is not decided yet.")
    against = text.partition("Against close, in the same minutes: ")[2].splitlines()[0]
    assert against.endswith("not explained by chance; another seed might change it.")
    assert "Stopped, as they were worse in an earlier round, which chance does not explain: poor." in text
    assert "Failed, so nothing is known of them: broken." in text
    assert re.findall('<section id="(.*?)">', html)[:3] == ["answer", "candidates", "summary"]
    assert "docs/results.md, Against other programs" in html


def test_a_steeper_curve_is_said(page):
    choice = page[2]
    earlier = choice.rounds[-2]
    late = dict(earlier, values=earlier["values"] | {"close": 0.0})
    changed = dataclasses.replace(choice, rounds=[late, choice.rounds[-1]])
    judged = [choices.judgement_of(choice, name) for name in ("best", "close")]
    said = answer.answer(changed, judged)[1]
    assert said.endswith("not explained by chance, but its curve is steeper, so more minutes might change it.")


def test_the_command_goes_on_for_as_long_as_is_worth_it(page):
    text, _, choice = page
    command = text.splitlines()[-1]
    assert command.startswith("accelerate launch scripts/train_ssd.py 1 --run.output_dir=")
    assert "--run.name=best --run.resume=latest --run.resume_schedule=new" in command
    assert command.endswith(" --run.epochs=1000000 --run.max_steps=null"), "whatever length its settings file has"
    assert "--run.eval_every" not in command, "it is evaluated as its settings file says"
    minutes = int(re.search(r"max_minutes=(\d+)", command)[1])
    assert minutes >= 2 * choice.rounds[-1]["minutes"]


def test_each_candidate_has_its_row_and_its_pictures(page):
    html = page[1]
    table = html.partition('<section id="candidates">')[2].partition("</section>")[0]
    rows = re.findall("<tr><td class=text>(.*?)</td>", table)
    assert rows == ["best", "equal", "close", "poor"]
    assert table.count("yours (random weights)") == 4
    assert "after each round" in table
    assert "against speed" in table
    pictures = re.findall("<div class=pictures>(.*?)</div>", html)
    assert len(pictures) == 8
    assert all(row.count("<figure") == 4 for row in pictures)


@pytest.mark.parametrize(("gain", "times"), [(-0.1, 0), (0.009, 0), (0.02, 1), (0.045, 2), (5.0, 4)])
def test_minutes_are_doubled_while_each_doubling_brings_a_point(gain, times):
    assert doublings_worth(gain) == times


def test_the_slope_is_that_of_a_doubling_of_the_last_round(tmp_path):
    values = {1.0: {"early": 0.1, "late": 0.0}, 2.0: {"early": 0.3, "late": 0.1}, 8.0: {"early": 0.5, "late": 0.4}}
    rounds = [{"minutes": minutes, "values": of_round} for minutes, of_round in values.items()]
    choice = choices.Choice(tmp_path, {}, {}, rounds)
    assert gain_of_doubling(choice, "early") == pytest.approx(0.1)
    assert expected(choice, "early") == pytest.approx(0.6)
    assert expected(choice, "late") == pytest.approx(0.55)


@pytest.mark.parametrize(
    ("model", "licence"),
    [
        ({"pretrained": "PekingU/rtdetr_v2_r18vd"}, "see huggingface.co/PekingU/rtdetr_v2_r18vd"),
        ({"pretrained": "weights/of/frcnn.pth"}, "of the publisher of frcnn.pth"),
        ({"pretrained_backbone": True, "backbone": "resnet50"}, "apache-2.0"),
        ({"pretrained_backbone": True, "backbone": "mobilevit_s"}, "cvnets-license"),
        ({"pretrained_backbone": False, "backbone": "resnet50"}, "yours (random weights)"),
    ],
)
def test_the_licence_is_that_of_the_first_weights(model, licence):
    assert licence_of(model) == licence
