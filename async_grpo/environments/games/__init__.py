"""Simple games that even a small model can learn, on a laptop."""
