"""What a completion answers: one rule for rewards, votes and evaluations (`stated.stated_answer`)."""
