"""Core's own components, registered through the same hook that third parties use."""
