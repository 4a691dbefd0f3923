"""Run by an interpreter of its own: it imports verifiers, and nothing of this package."""
