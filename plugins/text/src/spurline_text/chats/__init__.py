"""Render conversations by chat templates, and find the spans that the model wrote."""
