"""Rewards of this package."""
