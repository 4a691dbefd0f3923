"""Trying rewards on a file of completions, outside a run."""
