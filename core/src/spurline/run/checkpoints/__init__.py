"""Save the state of a run to disk, and resume a run from it."""
