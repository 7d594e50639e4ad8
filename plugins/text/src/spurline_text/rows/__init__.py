"""a row -> a conversation, a pair of texts or tokens."""
