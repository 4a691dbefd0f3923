"""From the fields of a dataclass to a command line: one source for options, help and files."""
