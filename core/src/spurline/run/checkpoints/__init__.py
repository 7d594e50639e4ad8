"""The state of a run on disk, and how a run goes on from it."""
