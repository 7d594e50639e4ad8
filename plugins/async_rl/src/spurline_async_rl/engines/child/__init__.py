"""Rollout engine `child_process`: core's engine in processes of its own."""
