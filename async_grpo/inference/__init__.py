"""Workers that run the model: vLLM engines generate completions, and logprob workers compute log-probs."""
