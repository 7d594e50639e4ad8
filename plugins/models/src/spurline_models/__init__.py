"""Load and change Hugging Face models for any backend, however many ranks share a model."""
