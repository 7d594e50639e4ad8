"""Environments for reinforcement learning: tools, and environments that others wrote."""
