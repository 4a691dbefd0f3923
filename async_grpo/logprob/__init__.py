"""Log-probs on demand: of a frozen reference policy, or of the policy at the start of a step."""
