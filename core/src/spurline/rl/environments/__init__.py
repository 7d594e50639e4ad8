"""Core's environments: one answer to a prompt, and a conversation with tools."""
