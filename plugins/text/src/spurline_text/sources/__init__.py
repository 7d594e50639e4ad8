"""Sources that make the batch of a step from samples."""
