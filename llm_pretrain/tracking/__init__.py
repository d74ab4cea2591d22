"""What a run shows: console, trackers, report, `top`."""
