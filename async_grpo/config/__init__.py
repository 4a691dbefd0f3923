"""A run's configuration: the rooms' options together, and everything that is refused before a process starts."""
