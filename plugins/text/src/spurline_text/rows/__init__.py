"""Formats: a row becomes a conversation, a pair of texts or tokens."""
