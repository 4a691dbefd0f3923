"""Programs that live and die together."""
