"""The verdict cache: answers of rewards, kept on disk across runs."""
