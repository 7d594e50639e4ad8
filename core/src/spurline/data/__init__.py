"""Tokenized data of a run: stores of samples, their order in training, and collators that make batches."""
