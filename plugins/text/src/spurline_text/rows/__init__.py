"""Read rows as conversations, pairs of texts or tokens."""
