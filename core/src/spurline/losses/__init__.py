"""Token losses, one file per family: pure functions from logprobs to a loss per token."""
