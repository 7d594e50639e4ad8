"""Core's reward components."""
