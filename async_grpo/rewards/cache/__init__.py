"""Answers of rewards across runs, on disk."""
