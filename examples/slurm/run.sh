#!/bin/bash
# A run on several nodes with 8 GPUs each: the first one trains, the others generate.
#     sbatch [--nodes=N] examples/slurm/run.sh [RUN.toml] [further options of `async-grpo run`]
# Submit it from the checkout, with its environment active, in a folder that all nodes see: model, data and runs/ lie there.
# Before its time is up, or when it is preempted, the job saves and is queued again; then it goes on where it was.
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

# The password of this job's Ray: it reaches all nodes by the environment, and stands in no file
RAY_AUTH_TOKEN=$(python -c 'import secrets; print(secrets.token_hex(32))')
export RAY_AUTH_TOKEN RAY_AUTH_MODE=token RAY_worker_niceness=0
address=${HEAD_IP:-$(hostname -I | cut -d' ' -f1)}:6379

export RAY_health_check_timeout_ms=5000 RAY_health_check_failure_threshold=3 # of a silent node: docs/clusters.md

# This script runs on the first node, whose GPUs are the trainer's: Ray gets none of them
ray start --head --node-ip-address="${address%:*}" --port=6379 --num-gpus=0 --disable-usage-stats
others=$((${SLURM_NNODES:-2} - 1))
srun --overlap --nodes="$others" --ntasks="$others" --exclude="$SLURMD_NODENAME" \
    ray start --address="$address" --disable-usage-stats --block &

# Engines wait for the GPUs of the other nodes, at most --start-timeout-s
run= told=
trap 'told=yes; [ -z "$run" ] || kill -TERM "$run"' TERM
async-grpo run "$config" --ray-address="$address" "${@:2}" &
run=$!
code=0
wait "$run" || code=$?
if [ -n "$told" ]; then # the signal has ended that wait, not the run
    code=0
    wait "$run" || code=$?
fi
if [ "$code" -eq 75 ]; then # it was told to end, and has saved
    exec scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
