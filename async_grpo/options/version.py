"""The version of the library, in a module that all other modules may import."""

VERSION = "0.1.0"
