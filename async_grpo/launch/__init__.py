"""A whole run on this machine from one command: programs, judge servers, the demo."""
