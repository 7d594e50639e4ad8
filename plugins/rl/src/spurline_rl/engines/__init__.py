"""Rollout engines of this package."""
