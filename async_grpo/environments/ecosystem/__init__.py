"""Adapters: environments of other packages, by their names there."""
