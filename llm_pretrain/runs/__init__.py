"""A run's folder: its rows, replays and progress."""
