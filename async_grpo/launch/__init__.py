"""Commands that start a run, its parts, the demo or judge servers, and commands that check or evaluate."""
