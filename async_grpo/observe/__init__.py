"""Commands that read a run's files and show the run as a table, a picture, or a page in the browser."""
