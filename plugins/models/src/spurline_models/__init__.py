"""What any backend needs of a Hugging Face model, however many ranks share it."""
