"""Compute advantages: scored groups in, flat columns of their tokens out. This package uses numpy and no torch."""
