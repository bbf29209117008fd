"""Run a training script with a clock by which each step takes half a second, and without its report, which takes long.

python with_clock.py SCRIPT ARGUMENTS
"""

import runpy
import sys
from pathlib import Path

from toolkit.run import session_end
from toolkit.run.plan import StepBudget

STEP_S = 0.5
add = StepBudget.add
StepBudget.add = lambda budget, step_s: add(budget, STEP_S)
session_end._report = lambda *_: None
sys.argv = sys.argv[1:]
sys.path[0] = str(Path(sys.argv[0]).parent)
runpy.run_path(sys.argv[0], run_name="__main__")
