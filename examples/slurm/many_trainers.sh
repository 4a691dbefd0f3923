#!/bin/bash
# A run whose trainer needs several nodes. The first TRAINERS nodes (by default 2) train. Each GPU of the others has an engine.
#     sbatch --nodes=4 examples/slurm/many_trainers.sh RUN.toml
# Everything else is as in run.sh. RUN.toml needs max_hours a little below --time, because torchrun does not pass on the run's
# own exit codes.
#SBATCH --job-name=async-grpo
#SBATCH --nodes=4
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@180
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
config=$1 trainers=${TRAINERS:-2} gpus=${SLURM_GPUS_ON_NODE:-8}
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
list() { (IFS=, && echo "$*"); }
training=$(list "${nodes[@]:0:trainers}") generating=$(list "${nodes[@]:trainers}")
head=${HEAD_IP:-$(hostname -I | cut -d' ' -f1)}

RAY_AUTH_TOKEN=$(python -c 'import secrets; print(secrets.token_hex(32))')
export RAY_AUTH_TOKEN RAY_AUTH_MODE=token RAY_worker_niceness=0 RAY_ADDRESS=$head:6379
# These two say when a silent node counts as dead (docs/clusters.md)
export RAY_health_check_timeout_ms=5000 RAY_health_check_failure_threshold=3
ray start --head --node-ip-address="$head" --port=6379 --num-gpus=0 --disable-usage-stats
rest=$((trainers - 1)) engines=$((${#nodes[@]} - trainers))
if ((rest)); then # the other trainer nodes join Ray without GPUs, because their GPUs belong to the ranks
    srun --overlap --nodes="$rest" --ntasks="$rest" --nodelist="$training" --exclude="$SLURMD_NODENAME" \
        ray start --address="$head:6379" --num-gpus=0 --disable-usage-stats --block &
fi
srun --overlap --nodes="$engines" --ntasks="$engines" --nodelist="$generating" \
    ray start --address="$head:6379" --num-gpus="$gpus" --disable-usage-stats --block &
for ((worker = 0; worker < engines * gpus; worker++)); do # Ray chooses a GPU for each worker
    async-grpo worker --config="$config" --mode=generation --node=gpu &
done

told=
srun --overlap --nodes="$trainers" --ntasks="$trainers" --nodelist="$training" \
    torchrun --nnodes="$trainers" --nproc-per-node="$gpus" --rdzv-backend=c10d --rdzv-endpoint="$head:29500" \
    --rdzv-id="$SLURM_JOB_ID" --shutdown-timeout=60 -m async_grpo.launch.trainer --config="$config" &
run=$! code=0
trap 'told=yes; kill -TERM "$run"' TERM
wait "$run" || code=$?
if [ -n "$told" ]; then # srun passes the signal on to the ranks, which save a checkpoint and end
    wait "$run" || true
    exec scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
