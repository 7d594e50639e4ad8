"""Placement of weights, optimizer state and activations: their dtype and device, and when they move."""
