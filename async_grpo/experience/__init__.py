"""Experience: which prompt is let in, who generates it, and how finished groups become micro-batches and steps."""
