"""`torchrun --nproc_per_node=N trainer_core.py ...`: the same as `torchrun ... -m async_grpo.launch.trainer ...`."""

from async_grpo.launch.trainer import main

if __name__ == "__main__":
    main()
