"""Environments of this package: one answer to a prompt, and a conversation with tools."""
