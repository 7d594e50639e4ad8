"""Batches of sequences through a model as streams of tokens, in which no sequence sees another."""
