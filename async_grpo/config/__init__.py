"""The configuration of a run: the options of all packages, and all checks that happen before a process starts."""
