#!/usr/bin/env bash
# One run on Slurm, over as many time limits as it takes: saved before each limit, requeued, and resumed.
#
#   sbatch --nodes 2 --gpus-per-node 8 --cpus-per-task 64 --time 04:00:00 scripts/runs/slurm.sh \
#       runs/detr scripts/train_detr.py --config configs/detr/rtdetr_v2_r18_coco.yaml --run.name detr
#
# Submit it from the folder of the repository, with the environment in which `torchrun` is found, and with the run folder
# on a disk that all nodes share. Two minutes before the limit Slurm sends SIGUSR1 to this script alone; the run saves its
# state and ends, and the job is put into the queue again. SIGTERM (scancel, or a preemption after which Slurm requeues by
# itself) saves too, and nothing is requeued here. Ends as until_done.sh does. A machine is one task, whose CPUs are shared
# by the processes of its GPUs and their `data.workers`; without --cpus-per-task Slurm gives it one.
#
#SBATCH --job-name=detection
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
set -um # -m: the run has a process group of its own
folder=$1
script=$2
shift 2

asked=''
run=''
ask() { # until_done.sh and torchrun know SIGTERM; SIGUSR1 would end torchrun
    asked=$1
    [ -n "$run" ] && kill -s TERM "$run" 2>/dev/null
}
trap 'ask USR1' USR1
trap 'ask TERM' TERM

export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-100} # torchrun kills what saves for longer
if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then # since Slurm 22.05 srun does not take it over from sbatch
    export SRUN_CPUS_PER_TASK=${SRUN_CPUS_PER_TASK:-$SLURM_CPUS_PER_TASK}
fi
cd "${SLURM_SUBMIT_DIR:-.}" || exit 2 # Slurm runs a copy of this file
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
scripts/runs/until_done.sh "$folder" \
    srun torchrun --nnodes "$SLURM_NNODES" --nproc_per_node "${SLURM_GPUS_ON_NODE:-1}" \
    --rdzv_id "$SLURM_JOB_ID" --rdzv_backend c10d --rdzv_endpoint "$head:${MASTER_PORT:-29500}" "$script" "$@" &
run=$!
[ -n "$asked" ] && kill -s TERM "$run" 2>/dev/null # it came before that
while true; do # a signal interrupts `wait`
    wait "$run"
    code=$?
    kill -0 "$run" 2>/dev/null || break
done
if [ "$asked" = USR1 ] && [ "$code" -eq 85 ]; then
    echo "slurm.sh: the state is saved; the job $SLURM_JOB_ID goes into the queue again" >&2
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
