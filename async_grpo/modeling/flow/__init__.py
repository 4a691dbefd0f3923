"""Flow-matching models in folders of diffusers: loading them, and the policy that computes a log-prob for each step."""
