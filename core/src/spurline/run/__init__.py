"""The life of a run: from a config to a result."""
