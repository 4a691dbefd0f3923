"""Token ids in, under a policy version: completions from vLLM, and log-probs from a reference or proximal policy."""
