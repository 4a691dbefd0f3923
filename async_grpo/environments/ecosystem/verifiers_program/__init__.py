"""Programs for an interpreter of their own, which import verifiers and nothing of this package."""
