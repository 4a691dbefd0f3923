"""Adapters for environments of other packages. Each module has the name of the package."""
