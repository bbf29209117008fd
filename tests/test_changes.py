"""What a resumed run says of settings that are not those of before, and what it keeps of them."""

import pytest

from toolkit.base.errors import BadInput
from toolkit.run.settings_file import (
    changes,
    config_files,
    in_force,
    newest_config,
    next_config,
    read_settings,
    save_config,
)

BEFORE = {
    "run": {"seed": 0, "max_steps": None, "max_minutes": 1.0, "name": "a", "keep": 2},
    "model": {"architecture": "ssd", "pretrained": None, "d_model": 96, "strides": [4, 8]},
    "optim": {"name": "adamw", "lr": 1e-3, "max_norm": 0.1}, "schedule": {"name": "cosine"},
}  # fmt: skip


def verdicts(after: dict, keep_schedule: bool = True, **options) -> dict:
    merged = {group: entries | after.get(group, {}) for group, entries in BEFORE.items()}
    return {change.key: change.verdict for change in changes(BEFORE, merged, keep_schedule, **options)}


@pytest.mark.parametrize(("after", "saved", "new"), [
    ({"optim": {"lr": 1e-2}}, "ignored", "used"),
    ({"schedule": {"name": "linear"}}, "ignored", "used"),
    ({"run": {"max_steps": 9}}, "ignored", "used"),
    ({"run": {"seed": 9}}, "ignored", "ignored"),
    ({"run": {"keep": 9}}, "used", "used"),
    ({"optim": {"max_norm": 0.0}}, "used", "used"),
    ({"model": {"d_model": 64}}, "used", "used"),
    ({"optim": {"name": "sgd"}}, "refused", "refused"),
    ({"model": {"architecture": "ssdlite"}}, "refused", "refused"),
])  # fmt: skip
def test_each_setting_is_used_ignored_or_refused(after, saved, new):
    assert [*verdicts(after).values()] == [saved] and [*verdicts(after, keep_schedule=False).values()] == [new]


def test_what_is_no_change_is_not_said():
    same = {"run": {"name": "b", "new": 1}, "model": {"strides": (4, 8)}, "optim": {"lr": 0.001}}
    assert verdicts(same) == {}
    assert verdicts({"run": {"max_minutes": 2.0}}, minutes_count=True) == {"run.max_minutes": "used"}


def test_a_change_is_one_line_and_what_is_ignored_is_not_in_force():
    after = BEFORE | {"optim": BEFORE["optim"] | {"lr": 0.5, "max_norm": 1}, "run": BEFORE["run"] | {"name": "x\ny"}}
    found = changes(BEFORE, after, True)
    assert [str(change) for change in found] == [
        "optim.lr 0.001 -> 0.5: ignored, the checkpoint's goes on; --run.resume_schedule new uses it",
        "optim.max_norm 0.1 -> 1: used",
    ]
    assert in_force(after, found)["optim"] == {"name": "adamw", "lr": 1e-3, "max_norm": 1}
    with pytest.raises(BadInput, match="optim.name adamw -> sgd: refused.*--run.name"):
        in_force(BEFORE, changes(BEFORE, BEFORE | {"optim": BEFORE["optim"] | {"name": "sgd"}}, True))


def test_every_start_keeps_its_settings(tmp_path):
    assert next_config(tmp_path) == newest_config(tmp_path) == tmp_path / "config.yaml"
    for number, eval_only in enumerate([False] * 11 + [True], 1):
        settings = BEFORE | {"run": {"eval_only": eval_only, "number": number}}
        save_config(settings, next_config(tmp_path), ["two\nlines: {"])
    assert [path.name for path in config_files(tmp_path)][:3] == ["config.yaml", "config_2.yaml", "config_3.yaml"]
    assert config_files(tmp_path)[-1].name == "config_12.yaml"
    assert newest_config(tmp_path).name == "config_11.yaml", "an evaluation alone says nothing about the run"
    assert read_settings(tmp_path / "config_11.yaml")["run"]["number"] == 11
    assert (tmp_path / "config_2.yaml").read_text().startswith("# two lines: {\n")
