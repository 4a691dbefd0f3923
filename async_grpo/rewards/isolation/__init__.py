"""Processes for users' rewards: a reward that hangs, crashes, forks or exhausts its memory loses only one sample."""
