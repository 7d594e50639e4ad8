"""Fully asynchronous rollouts for Spurline: a proven staleness bound, vLLM engines, weight updates in flight."""
