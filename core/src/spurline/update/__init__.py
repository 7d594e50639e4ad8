"""Turn batches into optimizer steps."""
