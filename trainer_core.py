"""`torchrun --nproc_per_node=N trainer_core.py ...`: the same as `torchrun ... -m async_grpo.programs.trainer ...`."""

from async_grpo.programs.trainer import main

if __name__ == "__main__":
    main()
