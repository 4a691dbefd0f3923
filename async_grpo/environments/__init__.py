"""Programs that play with the policy, turn by turn: see `docs/environments.md`."""
