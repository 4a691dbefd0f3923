"""Pages to look at a run: files of HTML without a remote script, where text of a model stays text."""
