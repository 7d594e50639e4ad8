"""samples -> the batch of a step."""
