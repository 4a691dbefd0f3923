"""The version of the library, where every room can read it."""

VERSION = "0.1.0"
