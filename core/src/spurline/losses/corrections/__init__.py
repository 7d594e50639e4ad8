"""Corrections for the difference between the engine that generates and the trainer, one file per algorithm."""
