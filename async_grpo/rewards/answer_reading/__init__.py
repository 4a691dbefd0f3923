"""Finds the answer in a completion. Rewards, votes and evaluations use the same rule (`stated.stated_answer`)."""
