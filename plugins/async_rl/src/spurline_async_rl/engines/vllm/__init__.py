"""Rollout engine `vllm`: engines on this machine, engines in Ray actors, or external servers."""
