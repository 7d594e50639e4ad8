"""Plan a run before it starts: its memory, steps and data."""
