"""Rollout engine `child_process`: the Hugging Face model in processes of its own."""
