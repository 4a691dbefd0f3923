"""Answers of rewards across runs, on disk.

verdicts   VerdictCache: one call for each question, also for those asked at the same time; what makes two the same
file       the SQLite file: entries and pruning
"""
