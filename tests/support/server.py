"""Forks runs of the scripts from a process that has torch and transformers in it: a second a run instead of ten.

Reads one request a line, answers with the process ids and, once all have ended, their exit codes (-9: killed by 9).
What runs in the child is the script itself, as `python SCRIPT ARGS` would run it; `faults` go in before.
"""

import atexit
import contextlib
import importlib
import json
import os
import re
import runpy
import signal
import sys
import tempfile
import threading
import traceback
from pathlib import Path

from places import ROOT
from wandb.sdk.data_types._private import MEDIA_TMP

PRELOAD = """
torch accelerate accelerate.tracking timm transformers.models.rt_detr_v2.modeling_rt_detr_v2
transformers.models.detr.modeling_detr toolkit.run.session toolkit.detectors.detr.detr
toolkit.detectors.detr.rt_detr toolkit.tools.report toolkit.evaluation.coco scipy.optimize
torch.distributed.algorithms.join torch.nn.parallel.distributed pandas attrs toolkit.detectors.faster_rcnn.model
toolkit.detectors.ssd.model toolkit.detectors.yolov3.model toolkit.detectors.scene_graphs.start
toolkit.detectors.scene_graphs.two_stage toolkit.tools.predict.open toolkit.tools.predict.image_files
toolkit.tools.predict.predict_split toolkit.tools.report.write toolkit.tools.report.comparison
matplotlib.backends.backend_agg matplotlib.figure
"""


def warm_up() -> None:
    """Imports; the parser of each script once, which reads the sources of the settings; and one model saved."""
    for name in PRELOAD.split():
        importlib.import_module(name)
    from toolkit.models import build_detector
    from toolkit.run.command_line import parse_config

    for path in sorted((ROOT / "scripts").glob("train_*.py")):
        script = runpy.run_path(str(path))
        parse_config(script["Config"], [], script["DEFAULT_CONFIG"])
    re._MAXCACHE = 10_000  # transformers compiles a pattern for every weight when it saves, a second each time
    small = {"backbone": "test_resnet", "d_model": 32, "heads": 2, "ffn_dim": 32, "decoder_layers": 2, "num_queries": 9}
    detector = build_detector("rt_detr_v2", class_names=["a"], **small)
    with tempfile.TemporaryDirectory() as folder:
        detector.save_final(Path(folder), [])


def run_script(request: dict, rank: int) -> int:
    """The script's exit code; what python does at the end of a program is done here too."""
    import faults

    sys.argv = [request["script"], *request["args"]]
    sys.path.insert(0, str(Path(request["script"]).parent))
    code = 0
    try:
        faults.install(request["faults"], rank)
        runpy.run_path(request["script"], run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:  # noqa: BLE001  as the interpreter: a traceback, and 1, or 130 after Ctrl-C
        traceback.print_exc()
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()
    atexit._run_exitfuncs()
    if code == 0 and (alive := threads_of_gloo()):
        print(f"{alive} threads of gloo live: one that asks for the interpreter as it ends aborts the process")
        code = 134
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def threads_of_gloo() -> int:
    names = []
    for task in Path("/proc/self/task").glob("*"):  # none but on Linux
        with contextlib.suppress(OSError):  # a thread that ends meanwhile
            names.append(task.joinpath("comm").read_text())
    return sum("gloo" in name for name in names)


def fork(request: dict, rank: int, group: int) -> int:
    pid = os.fork()
    if pid:
        os.setpgid(pid, group or pid)
        return pid
    code = 1
    try:
        os.makedirs(MEDIA_TMP.name, exist_ok=True)  # W&B's own; the first child that ends takes it away
        os.setpgid(0, group)
        null, log = os.open(os.devnull, os.O_RDONLY), os.open(request["logs"][rank], os.O_WRONLY | os.O_CREAT, 0o644)
        for target, source in ((0, null), (1, log), (2, log)):
            os.dup2(source, target)
        os.environ.update(request["env"][rank])
        sys.path[1:1] = request["env"][rank].get("PYTHONPATH", "").split(os.pathsep)  # as Python would at its start
        os.chdir(request["cwd"])
        code = run_script(request, rank)
    finally:
        os._exit(code)


def main() -> None:
    warm_up()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    print(json.dumps("ready"), file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        pids: list[int] = []
        for rank in range(len(request["env"])):
            pids.append(fork(request, rank, pids[0] if pids else 0))
        print(json.dumps(pids), file=answers)
        print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]), file=answers)


if __name__ == "__main__":
    main()
