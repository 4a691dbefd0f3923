"""Files of others: what is opened of them, and how much is read."""
