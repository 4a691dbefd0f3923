"""Workers that run the model: generation workers (vLLM engines by default), and workers that compute log-probs."""
