"""Environments that a laptop learns."""
