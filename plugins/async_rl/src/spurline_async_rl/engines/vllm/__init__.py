"""Rollout engine `vllm`: in process, in Ray actors, or an external server."""
