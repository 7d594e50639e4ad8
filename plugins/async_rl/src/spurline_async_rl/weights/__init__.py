"""Send weights from a backend to rollout engines, with one transport per module."""
