"""Evaluate a run on held-out data, and act on the results."""
