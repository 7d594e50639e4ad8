"""Rows and chats become tokens: datasets, formats, chat templates, tokenization and the sources of fine-tuning."""
