"""Sources: samples become the batch of a step."""
