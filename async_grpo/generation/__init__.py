"""Generation: vLLM behind one small class, token ids in, token ids with log-probs and policy versions out."""
