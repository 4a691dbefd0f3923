#!/bin/bash
# A run on several nodes with 8 GPUs each: the first one trains, the others generate.
#     sbatch [--nodes=N] examples/slurm/run.sh [RUN.toml] [further options of `async-grpo run`]
# Submit it from the checkout, with the checkout's Python environment active. The checkout must be in a folder that all nodes
# share, and contain the model, the data and runs/. Before its time is up, or when it is preempted, the job saves a checkpoint
# and is queued again. When it starts again, the run continues from the checkpoint.
#SBATCH --job-name=async-grpo
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@180
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
config=${1:-examples/maths_2x8.toml}

# The password of this job's Ray cluster. srun passes it to all nodes in the environment. It is not written to a file
RAY_AUTH_TOKEN=$(python -c 'import secrets; print(secrets.token_hex(32))')
export RAY_AUTH_TOKEN RAY_AUTH_MODE=token RAY_worker_niceness=0
address=${HEAD_IP:-$(hostname -I | cut -d' ' -f1)}:6379

# These two say when a silent node counts as dead (docs/clusters.md)
export RAY_health_check_timeout_ms=5000 RAY_health_check_failure_threshold=3

# This script runs on the first node. Ray gets none of this node's GPUs, because they belong to the trainer
ray start --head --node-ip-address="${address%:*}" --port=6379 --num-gpus=0 --disable-usage-stats
others=$((${SLURM_NNODES:-2} - 1))
srun --overlap --nodes="$others" --ntasks="$others" --exclude="$SLURMD_NODENAME" \
    ray start --address="$address" --disable-usage-stats --block &

# The engines wait until the other nodes have joined Ray with their GPUs, for at most --start-timeout-s
run= told=
trap 'told=yes; [ -z "$run" ] || kill -TERM "$run"' TERM
async-grpo run "$config" --ray-address="$address" "${@:2}" &
run=$!
code=0
wait "$run" || code=$?
if [ -n "$told" ]; then # the signal ended only `wait`; the run is still saving
    code=0
    wait "$run" || code=$?
fi
if [ "$code" -eq 75 ]; then # this code means that the run has saved a checkpoint, and should continue
    exec scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
