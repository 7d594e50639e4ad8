"""Samples or turns to one `TrainingBatch`: the readable reference that fast collators are compared with."""
