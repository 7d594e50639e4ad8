"""Core's trackers, which record or show the metrics of each finished step."""
