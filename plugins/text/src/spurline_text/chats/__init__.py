"""a conversation -> the text of a chat template, and where the model wrote."""
