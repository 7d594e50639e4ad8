"""Ways of weights from a backend to rollout engines: one file each, and what all share."""
