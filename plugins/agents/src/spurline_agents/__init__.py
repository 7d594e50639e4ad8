"""Serve an OpenAI-compatible endpoint, through which any agent can be an environment.

An attempt: row -> session -> the agent, a function or a program -> its HTTP requests -> server -> exact
tokens (conversations) -> policy handle -> choices -> HTTP; what the agent returns -> rewards -> Trajectory.
"""
