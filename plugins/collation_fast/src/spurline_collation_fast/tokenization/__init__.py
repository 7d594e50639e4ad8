"""Tokenization `parallel`: rows to tokens on all cores."""
