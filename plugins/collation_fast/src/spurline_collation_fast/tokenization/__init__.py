"""Tokenization `parallel`: turn rows into tokens on all cores."""
