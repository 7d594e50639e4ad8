"""Core's trackers: where the metrics of each finished step go."""
