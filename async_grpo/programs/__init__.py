"""The commands: each parses its options, builds what it needs, and runs it."""
