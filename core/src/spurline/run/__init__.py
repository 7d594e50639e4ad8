"""Run a config: build its parts, train, evaluate, save checkpoints, and write the result."""
