"""Chat templates: a conversation becomes text, with the spans that the model wrote."""
