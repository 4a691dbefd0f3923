"""Programs that run in a separate Python interpreter. They import verifiers, and nothing from this library."""
