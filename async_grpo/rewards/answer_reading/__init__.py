"""Reading the answer of a completion, by one rule for rewards, votes and evaluations (`stated.stated_answer`)."""
