"""The arithmetic of policy-gradient training: pure functions on (batch, tokens) tensors, torch alone."""
