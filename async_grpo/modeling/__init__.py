"""The policy as a network: loading a Hugging Face causal LM, its packed forward, its log-probs."""
