"""Writes this rank's process id into a folder, then is the script: `torchrun pid_of_rank.py FOLDER SCRIPT ARGS`."""

import os
import runpy
import sys
from pathlib import Path

folder, script, *arguments = sys.argv[1:]
Path(folder, f"pid_of_rank{os.environ['RANK']}").write_text(str(os.getpid()))
sys.argv = [script, *arguments]
runpy.run_path(script, run_name="__main__")
