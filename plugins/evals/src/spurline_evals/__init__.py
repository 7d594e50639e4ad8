"""Evaluate on benchmarks with lm-eval during a run."""
