"""Core's rollout engines."""
