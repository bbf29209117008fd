"""scripts/runs and configs/accelerate: until_done.sh, slurm.sh with stand-ins for Slurm's programs, kubernetes.yaml."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from places import ROOT

pytest.importorskip("fcntl", reason="shell scripts: not on Windows")

RUNS = ROOT / "scripts" / "runs"
# A run that notes each of its starts and does what its plan says of it: "state code [checkpoint]", or waits.
RUN = """
import json, os, signal, sys, time
from pathlib import Path
folder, plan = Path(sys.argv[1]), sys.argv[2].split(",")
assert sys.argv[3:] == ["--run.resume", "latest"]
starts = folder / "starts"
number = len(starts.read_text()) if starts.exists() else 0
starts.write_text("x" * (number + 1))

def status(state):
    (folder / ".tmp").write_text(json.dumps({"state": state, "time": time.time()}, indent=2))
    os.replace(folder / ".tmp", folder / "status.json")

words = plan[min(number, len(plan) - 1)].split()
if words[0] == "wait":
    def stop(number, frame):
        print("saving", flush=True)
        (folder / "saved").read_bytes()  # a pipe: until the test has looked
        status("preempted")
        (folder / f"stopped_by_{number}").write_text("")
        os._exit(85)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, stop)
    status("running")
    print("waiting", flush=True)
    signal.pause()
state, code, *checkpoint = words
if state != "-":
    status(state)
if checkpoint:
    link = folder / "checkpoints" / "latest"
    link.unlink(missing_ok=True)
    link.symlink_to(checkpoint[0])
sys.exit(int(code))
"""
# Hands no signal on, as the one of accelerate for one process.
LAUNCHER = "import subprocess, sys; sys.exit(subprocess.Popen(sys.argv[1:]).wait())"
STAND_INS = {
    "scontrol": '#!/bin/sh\necho "$@" >> "$LOG"\n[ "$1" = show ] && printf "node7\\nnode8\\n"\nexit 0\n',
    "srun": '#!/bin/sh\necho "srun with ${SRUN_CPUS_PER_TASK-no} CPUs" >> "$LOG"\nexec "$@"\n',
    # what of its arguments are torchrun's own is written down; the rest is the program
    "torchrun": f'#!/bin/sh\necho "torchrun $*" >> "$LOG"\nshift 10\nexec "{sys.executable}" "$@"\n',
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "run.py").write_text(RUN)
    return tmp_path


def command(folder: Path, plan: str, *launcher) -> list:
    return [RUNS / "until_done.sh", folder, *launcher, sys.executable, folder / "run.py", folder, plan]


def until_done(folder: Path, plan: str) -> tuple[int, int]:
    """(exit code, starts)"""
    done = subprocess.run(command(folder, plan), capture_output=True)
    return done.returncode, len((folder / "starts").read_text())


@pytest.mark.parametrize(
    ("plan", "code", "starts"),
    [
        ("done 0", 0, 1),
        ("preempted 85 step_1,failed 1 step_2,done 0", 0, 3),
        ("failed 1,failed 1,failed 1 step_1,failed 1,preempted 85,done 0 step_2", 0, 6),
        ("preempted 1 step_1,failed 1,failed 1,failed 1", 1, 4),
        ("bad_input 1", 2, 1),
        ("stopped_by_guard 1", 3, 1),
        ("preempted 85 step_1,- 2", 2, 2),
    ],
)
def test_it_starts_again_while_there_is_progress(folder, plan, code, starts):
    assert until_done(folder, plan) == (code, starts)


@pytest.mark.parametrize("earlier", ["preempted", "done", "running"])
def test_a_start_that_dies_before_training_does_not_loop(folder, earlier):
    """What the status of an earlier start says is nothing about this one."""
    (folder / "status.json").write_text(f'{{\n  "state": "{earlier}"\n}}')
    assert until_done(folder, "- 1") == (1, 3)


@pytest.mark.parametrize(
    ("name", "launcher"),
    [
        ("SIGTERM", ()),
        ("SIGINT", ()),
        ("SIGUSR1", ()),
        ("SIGTERM", (sys.executable, "-c", LAUNCHER)),
    ],
)
def test_a_signal_reaches_the_run_which_saves_and_ends_both(folder, name, launcher):
    os.mkfifo(folder / "saved")
    number = getattr(signal, name)
    with subprocess.Popen(
        command(folder, "wait", *launcher),
        start_new_session=True,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # also where the tests run in the background
    ) as process:
        assert process.stdout.readline() == "waiting\n"
        os.kill(process.pid, number)  # to the script alone, as a batch system does
        assert process.stdout.readline() == "saving\n"
        assert process.poll() is None, "it waits for the run that saves"
        (folder / "saved").write_text("go on")
        assert process.wait() == 85
    assert (folder / f"stopped_by_{number.value}").exists()
    assert (folder / "starts").read_text() == "x", "not started again"


@pytest.fixture
def slurm(folder):
    """`slurm(plan)`: the job script under way, in a folder with a run that does what its plan says."""
    programs = folder / "bin"
    programs.mkdir()
    for name, text in STAND_INS.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    copy = folder / "slurm_script"  # Slurm runs a copy
    copy.write_bytes((RUNS / "slurm.sh").read_bytes())
    env = os.environ | {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "LOG": str(folder / "log"),
        "SLURM_JOB_ID": "42",
        "SLURM_JOB_NODELIST": "node[7-8]",
        "SLURM_NNODES": "2",
        "SLURM_GPUS_ON_NODE": "8",
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_CPUS_PER_TASK": "64",
    }
    started = []

    def start(plan: str) -> subprocess.Popen:
        arguments = ["bash", copy, folder, folder / "run.py", folder, plan]
        started.append(
            subprocess.Popen(
                arguments,
                env=env,
                start_new_session=True,
                cwd="/",
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize(("sent", "requeued"), [("SIGUSR1", True), ("SIGTERM", False)])
def test_before_the_time_limit_the_run_saves_and_the_job_is_requeued(slurm, folder, sent, requeued):
    (folder / "saved").touch()
    process = slurm("wait")
    assert "waiting\n" in process.stdout
    os.kill(process.pid, getattr(signal, sent))  # `--signal=B:`: to the script alone
    assert process.wait() == 85
    assert (folder / f"stopped_by_{signal.SIGTERM.value}").exists()
    log = (folder / "log").read_text()
    assert ("requeue 42\n" in log) == requeued
    assert "torchrun --nnodes 2 --nproc_per_node 8 --rdzv_id 42 --rdzv_backend c10d --rdzv_endpoint node7:29500" in log
    assert "srun with 64 CPUs\n" in log


@pytest.mark.parametrize(("plan", "code"), [("failed 1 step_1,done 0", 0), ("bad_input 1", 2)])
def test_a_job_that_ends_by_itself_is_not_requeued(slurm, folder, plan, code):
    assert slurm(plan).wait() == code
    assert "requeue" not in (folder / "log").read_text()


def test_slurm_is_asked_for_the_signal_that_the_script_waits_for():
    text = (RUNS / "slurm.sh").read_text()
    assert "#SBATCH --signal=B:USR1@120" in text
    assert "trap 'ask USR1' USR1" in text
    assert "#SBATCH --cpus-per-task=" in text


def test_the_kubernetes_job_starts_a_script_and_fails_where_a_restart_would_not_help():
    spec = yaml.safe_load((RUNS / "kubernetes.yaml").read_text())["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    words = container["command"] + container["args"]
    assert (ROOT / words[0]).is_file()
    assert "scripts/train_detr.py" in words
    given = dict(zip(words, words[1:], strict=False))
    assert words[1] == f"{given['--run.output_dir']}/{given['--run.name']}"
    rule = spec["podFailurePolicy"]["rules"][0]
    assert rule["action"] == "FailJob"
    assert rule["onExitCodes"]["values"] == [2, 3]
    mounted = [mount["name"] for mount in container["volumeMounts"]]
    assert sorted(mounted) == sorted(volume["name"] for volume in pod["volumes"])


@pytest.mark.parametrize(
    "expected",
    [
        "one_gpu NO no False 1",
        "gpus MULTI_GPU no False 1",
        "gpus_bf16 MULTI_GPU bf16 False 1",
        "gpus_fp16 MULTI_GPU fp16 False 1",
        "two_machines MULTI_GPU fp16 False 2",
        "cpu NO no True 1",
    ],
)
def test_accelerate_reads_the_launcher_settings(expected):
    name = expected.split()[0]
    config = load_config_from_file(str(ROOT / "configs" / "accelerate" / f"{name}.yaml"))
    kind = str(config.distributed_type).rpartition(".")[2]
    assert f"{name} {kind} {config.mixed_precision} {config.use_cpu} {config.num_machines}" == expected
