"""The rollout engine `in_process`. Start reading at `engine.py`."""
