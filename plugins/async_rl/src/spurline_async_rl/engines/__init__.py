"""Run pools of rollout engines: in child processes, as vLLM engines, in Ray actors, or as servers."""
