"""Read rows from files, folders and the Hugging Face hub."""
