"""How a run is looked at, from its files alone: a table, a page for the browser, or a picture."""
