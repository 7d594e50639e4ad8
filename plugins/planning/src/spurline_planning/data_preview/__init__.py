"""Show the first rows of a run token by token."""
