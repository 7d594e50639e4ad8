"""Token cache, parallel tokenization, vectorized collators, packing and async collation for Spurline."""
