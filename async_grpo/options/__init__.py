"""Options: the fields of a dataclass define the command line, its help, and the keys of option files."""
