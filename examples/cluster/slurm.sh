#!/bin/bash
# A run on two nodes with 8 GPUs each: the first one trains, the second one generates.
#     sbatch examples/cluster/slurm.sh [RUN.toml] [further options of `async-grpo run`]
# Submit it from the checkout, with its environment active, in a folder that both nodes see: model, data and runs/ lie there.
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

# The password of this job's Ray: it reaches both nodes by the environment, and stands in no file
RAY_AUTH_TOKEN=$(python -c 'import secrets; print(secrets.token_hex(32))')
export RAY_AUTH_TOKEN RAY_AUTH_MODE=token RAY_worker_niceness=0
address=${HEAD_IP:-$(hostname -I | cut -d' ' -f1)}:6379

# This script runs on the first node, whose GPUs are the trainer's: Ray gets none of them
ray start --head --node-ip-address="${address%:*}" --port=6379 --num-gpus=0 --disable-usage-stats
srun --overlap --nodes=1 --ntasks=1 --exclude="$SLURMD_NODENAME" \
    ray start --address="$address" --disable-usage-stats --block &

# An engine that starts before its GPUs are known would be put on a CPU
export address
timeout "${GPU_WAIT_S:-300}" bash -c 'until ray status --address="$address" | grep -q "/8.0 GPU"; do sleep 2; done' || {
    echo "error: the GPUs of the second node did not join Ray" >&2
    exit 1
}

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
