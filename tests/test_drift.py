"""The loop, `train` and `main` of the five training scripts are the same text but for what is listed here, with its reason.
"""

import ast
import difflib

import pytest
from places import ROOT

SCRIPTS = ROOT / "scripts"
OTHERS = sorted(path.stem for path in SCRIPTS.glob("train_*.py") if path.stem != "train_detr")
# script -> function -> lines that differ from train_detr.py
ALLOWED = {
    "train_ssd": {  # CVNets: losses weigh each other
        "train_one_epoch": ["+ t.detector.multibox.balance_losses(window.totals)"],
    },
    "train_sgg": {  # a head on a detector starts in its own way, and recall is measured, not AP
        "train": [
            "- from toolkit.evaluation.coco import CocoEvaluator",
            "+ from toolkit.evaluation.coco import GRAPH_EVAL_SETTINGS, make_evaluator",
            "+ from toolkit.detectors.scene_graphs.start import lacking_relations, start_scene_graph",
            "- detector = s.make_detector(table)",
            "- t = s.training(detector, table, val_table, CocoEvaluator(val_table, s.config.eval.backend))",
            "+ detector = s.make_detector(table, start_scene_graph)",
            "+ note = None if s.checkpoint else without_detector(s.config.model, s.config.data.path)",
            "+ if note:",
            "+ s.say(note)",
            "+ for note in lacking_relations(table, val_table):",
            "+ s.say(note)",
            "+ of_graphs = {key: getattr(s.config.eval, key) for key in GRAPH_EVAL_SETTINGS}",
            "+ evaluator = make_evaluator(detector, val_table, s.config.eval.backend, **of_graphs)",
            "+ t = s.training(detector, table, val_table, evaluator)",
        ]
    },
}


def statements(script: str, function: str) -> list[str]:
    tree = ast.parse((SCRIPTS / f"{script}.py").read_text())
    node = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function)
    return [line.strip() for line in ast.unparse(node).splitlines()]


@pytest.mark.parametrize("script", OTHERS)
def test_a_script_differs_from_the_first_only_where_it_says_why(script):
    for function in ("train_one_epoch", "train", "main"):
        diff = difflib.ndiff(statements("train_detr", function), statements(script, function))
        different = [line for line in diff if line[0] in "+-"]
        assert sorted(different) == sorted(ALLOWED.get(script, {}).get(function, []))
