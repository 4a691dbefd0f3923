"""Experience: admits prompts, distributes them to workers, and turns finished groups into micro-batches and steps."""
