"""Reinforcement learning: prompts -> rollouts -> rewards -> advantages -> batch -> weight sync."""
