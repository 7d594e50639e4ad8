"""Compute advantages: scored groups in, the same groups with advantages out. This package uses numpy and no torch."""
