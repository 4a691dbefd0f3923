"""Try rewards on a file of completions, outside of a run."""
