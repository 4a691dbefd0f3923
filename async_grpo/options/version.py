"""The version of the library, in a module that every room may import."""

VERSION = "0.1.0"
