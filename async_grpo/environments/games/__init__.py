"""Games that a small model learns on a laptop."""
