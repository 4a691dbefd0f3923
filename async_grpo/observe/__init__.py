"""Commands that show a run from its files: a table, a page for the browser, or a picture."""
