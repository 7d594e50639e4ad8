"""Keep tokens in memory-mapped files on disk, under a key made from the data, the tokenizer and the settings."""
