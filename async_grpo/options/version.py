"""The version of the library. This module imports nothing, so that all other modules may import it."""

VERSION = "0.1.0"
