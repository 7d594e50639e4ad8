"""Serve an OpenAI-compatible endpoint, through which any agent can be an environment."""
