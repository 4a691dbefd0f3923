"""The engine of policies that draw."""
