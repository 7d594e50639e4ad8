"""Predict asynchronous runs for `spurline simulate`, with the scheduler on a virtual clock."""
