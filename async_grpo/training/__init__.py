"""The trainer: sharded model, exact gradient accumulation, checkpoints, and the loop over optimizer steps."""
