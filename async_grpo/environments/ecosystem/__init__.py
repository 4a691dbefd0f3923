"""Adapters for environments of other packages, each under the name of its package."""
