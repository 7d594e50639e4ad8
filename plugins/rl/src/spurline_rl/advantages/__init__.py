"""Advantages: scored groups in, the same groups with advantages out. Numpy only."""
