"""The trainer: sharding of the model, exact gradient accumulation, checkpoints, and the loop over optimizer steps."""
