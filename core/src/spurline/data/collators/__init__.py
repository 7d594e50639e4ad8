"""Collators that lay out samples or turns as a `TrainingBatch`: the readable reference for fast collators."""
