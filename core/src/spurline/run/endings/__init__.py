"""Stop a run on request, and describe how it ended."""
