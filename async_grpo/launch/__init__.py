"""Programs that start a run or parts of it, the demo, judge servers, and the other commands that need a machine."""
