"""Checkpoints as folders: whole and unchanged, or not used."""
