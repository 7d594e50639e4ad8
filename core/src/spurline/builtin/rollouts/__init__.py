"""Synchronous reinforcement learning as a source of batches: generate, score, look back, weigh, lay out."""
