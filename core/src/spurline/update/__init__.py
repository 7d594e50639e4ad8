"""A batch becomes optimizer steps."""
