#!/bin/bash
# A run whose trainer needs several nodes: the first TRAINERS (2) of them train, on each GPU of the others is an engine.
#     sbatch --nodes=4 examples/slurm/many_trainers.sh RUN.toml
# As run.sh in all else. RUN.toml needs --max-hours a little below --time: torchrun tells no exit code of a run's own.
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
export RAY_health_check_timeout_ms=5000 RAY_health_check_failure_threshold=3 # of a silent node: docs/clusters.md
ray start --head --node-ip-address="$head" --port=6379 --num-gpus=0 --disable-usage-stats
rest=$((trainers - 1)) engines=$((${#nodes[@]} - trainers))
if ((rest)); then # every rank joins Ray, which gets none of its GPUs
    srun --overlap --nodes="$rest" --ntasks="$rest" --nodelist="$training" --exclude="$SLURMD_NODENAME" \
        ray start --address="$head:6379" --num-gpus=0 --disable-usage-stats --block &
fi
srun --overlap --nodes="$engines" --ntasks="$engines" --nodelist="$generating" \
    ray start --address="$head:6379" --num-gpus="$gpus" --disable-usage-stats --block &
for ((worker = 0; worker < engines * gpus; worker++)); do # Ray finds each a GPU
    async-grpo worker --config="$config" --mode=generation --node=gpu &
done

told=
srun --overlap --nodes="$trainers" --ntasks="$trainers" --nodelist="$training" \
    torchrun --nnodes="$trainers" --nproc-per-node="$gpus" --rdzv-backend=c10d --rdzv-endpoint="$head:29500" \
    --rdzv-id="$SLURM_JOB_ID" --shutdown-timeout=60 -m async_grpo.launch.trainer --config="$config" &
run=$! code=0
trap 'told=yes; kill -TERM "$run"' TERM
wait "$run" || code=$?
if [ -n "$told" ]; then # srun hands the signal on; the ranks save, and end
    wait "$run" || true
    exec scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
