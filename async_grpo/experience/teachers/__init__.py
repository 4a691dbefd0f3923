"""Teachers: models whose log-probs of the sampled tokens train the policy (on-policy distillation)."""
