"""Show the first rows of a run as they will be trained, token by token."""
