"""slurm.sh with stand-ins for Slurm's programs, kubernetes.yaml, and settings of Accelerate's launcher."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from test_until_done import RUN

pytest.importorskip("fcntl", reason="shell scripts: not on Windows")

ROOT = Path(__file__).resolve().parents[1]
STAND_INS = {
    "scontrol": '#!/bin/sh\necho "$@" >> "$LOG"\n[ "$1" = show ] && printf "node7\\nnode8\\n"\nexit 0\n',
    "srun": '#!/bin/sh\necho "srun with ${SRUN_CPUS_PER_TASK-no} CPUs" >> "$LOG"\nexec "$@"\n',
    # what of its arguments are torchrun's own is written down; the rest is the program
    "torchrun": f'#!/bin/sh\necho "torchrun $*" >> "$LOG"\nshift 10\nexec "{sys.executable}" "$@"\n',
}


@pytest.fixture
def slurm(tmp_path):
    """`slurm(plan)`: the job script under way, in a folder with a run that does what its plan says."""
    started = []
    for name, text in STAND_INS.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    copy = tmp_path / "spool" / "slurm_script"  # Slurm runs a copy
    copy.parent.mkdir()
    copy.write_bytes((ROOT / "scripts" / "runs" / "slurm.sh").read_bytes())
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "run.py").write_text(RUN)
    env = os.environ | {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "LOG": str(tmp_path / "log"), "SLURM_JOB_ID": "42",
        "SLURM_JOB_NODELIST": "node[7-8]", "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "8",
        "SLURM_SUBMIT_DIR": str(ROOT), "SLURM_CPUS_PER_TASK": "64",
    }  # fmt: skip

    def start(plan: str) -> subprocess.Popen:
        command = ["bash", copy, tmp_path, tmp_path / "run.py", tmp_path, plan]
        pipes = {"stdout": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, env=env, start_new_session=True, cwd="/", **pipes))
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize(("sent", "requeued"), [("SIGUSR1", True), ("SIGTERM", False)])
def test_before_the_time_limit_the_run_saves_and_the_job_is_requeued(slurm, tmp_path, sent, requeued):
    (tmp_path / "saved").touch()
    process = slurm("wait")
    assert "waiting\n" in process.stdout
    os.kill(process.pid, getattr(signal, sent))  # `--signal=B:`: to the script alone
    assert process.wait() == 85
    assert (tmp_path / f"stopped_by_{signal.SIGTERM.value}").exists()
    log = (tmp_path / "log").read_text()
    assert ("requeue 42\n" in log) == requeued
    assert "torchrun --nnodes 2 --nproc_per_node 8 --rdzv_id 42 --rdzv_backend c10d --rdzv_endpoint node7:29500" in log
    assert "srun with 64 CPUs\n" in log


@pytest.mark.parametrize(("plan", "code"), [("failed 1 step_1,done 0", 0), ("bad_input 1", 2)])
def test_a_job_that_ends_by_itself_is_not_requeued(slurm, tmp_path, plan, code):
    assert slurm(plan).wait() == code
    assert "requeue" not in (tmp_path / "log").read_text()


def test_slurm_is_asked_for_the_signal_that_the_script_waits_for():
    text = (ROOT / "scripts" / "runs" / "slurm.sh").read_text()
    assert "#SBATCH --signal=B:USR1@120" in text and "trap 'ask USR1' USR1" in text
    assert "#SBATCH --cpus-per-task=" in text


def test_the_kubernetes_job_starts_a_script_and_fails_where_a_restart_would_not_help():
    spec = yaml.safe_load((ROOT / "scripts" / "runs" / "kubernetes.yaml").read_text())["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    command = container["command"] + container["args"]
    given = dict(zip(command, command[1:], strict=False))
    assert (ROOT / command[0]).is_file() and next(w for w in command if w.endswith(".py")) == "scripts/train_detr.py"
    assert command[1] == f"{given['--run.output_dir']}/{given['--run.name']}"
    rule = spec["podFailurePolicy"]["rules"][0]
    assert (rule["action"], rule["onExitCodes"]["values"]) == ("FailJob", [2, 3])
    volumes = {volume["name"] for volume in spec["template"]["spec"]["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes


def test_accelerate_reads_the_launcher_settings():
    from accelerate.commands.config.config_args import load_config_from_file

    found = {path.stem: load_config_from_file(str(path)) for path in (ROOT / "configs" / "accelerate").glob("*.yaml")}
    told = {name: (str(config.distributed_type).rpartition(".")[2], config.mixed_precision, config.use_cpu)
            for name, config in found.items()}  # fmt: skip
    assert told == {
        "one_gpu": ("NO", "no", False), "gpus": ("MULTI_GPU", "no", False), "gpus_bf16": ("MULTI_GPU", "bf16", False),
        "gpus_fp16": ("MULTI_GPU", "fp16", False), "two_machines": ("MULTI_GPU", "fp16", False),
        "cpu": ("NO", "no", True),
    }  # fmt: skip
    assert found["two_machines"].num_machines == 2 and found["cpu"].num_processes == 1
