"""Optimizers, which turn gradients into new weights, and schedules of the learning rate."""
