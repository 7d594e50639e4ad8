"""Optimizers and schedules: from gradients to new weights, and how far to go in each step."""
