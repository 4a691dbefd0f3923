"""Tools for processes: starting, watching and ending them, limits for servers, and safe reading of untrusted files."""
