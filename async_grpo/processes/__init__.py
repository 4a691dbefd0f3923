"""Programs that live and die together, and reading of files that other programs may have made."""
