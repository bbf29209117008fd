"""Every module of the toolkit has tests that a reader finds, and the changes that `tests/mutate.py` makes are real."""

import ast
from pathlib import Path

import mutate
import pytest
import which

MODULES = which.modules_of_toolkit()
EXAMPLE = """\
if a < b and not c:
    total.append(a + b)
"""


def test_every_module_has_tests():
    of_tests = which.modules_of_tests()
    found = {module: which.tests_of(module, of_tests) for module in MODULES}
    assert [module for module, tests in found.items() if not tests] == []


def test_the_file_of_the_same_name_comes_first():
    assert which.tests_of("toolkit.step.losses")[0] == which.ROOT / "tests" / "step" / "test_losses.py"


def test_an_unknown_file_is_refused(capsys):
    assert which.main(["toolkit/nonsense.py"]) == 2
    assert "expected a path such as" in capsys.readouterr().err


@pytest.fixture
def example(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(which, "ROOT", tmp_path)
    path = tmp_path / "example.py"
    path.write_text(EXAMPLE)
    return path


def test_each_kind_of_change_is_found(example):
    changed = {(mutant.kind, mutant.before, mutant.after) for mutant in mutate.mutants_of(example)}
    assert changed == {
        ("bound", "<", "<="),
        ("condition", "and", "or"),
        ("condition", "a < b and not c", "not (a < b and not c)"),
        ("dropped call", "total.append(a + b)", "pass"),
        ("sign", "+", "-"),
    }


def test_each_change_leaves_a_program(example):
    for mutant in mutate.mutants_of(example):
        end = mutant.offset + len(mutant.before)
        assert EXAMPLE[mutant.offset : end] == mutant.before
        ast.parse(EXAMPLE[: mutant.offset] + mutant.after + EXAMPLE[end:])


def test_a_seed_draws_changes_of_each_kind():
    drawn = mutate.draw(4, seed=3)
    assert {mutant.kind for mutant in drawn} == {"bound", "condition", "dropped call", "sign"}
