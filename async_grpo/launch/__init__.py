"""Everything that starts something: a run and its parts, the demo, judge servers, the tools of the command line."""
