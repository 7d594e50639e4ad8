"""An OpenAI-compatible endpoint, behind which any agent can be an environment."""
