"""Metrics of a run: files, trackers, console output, alarms and reports of stalls."""
