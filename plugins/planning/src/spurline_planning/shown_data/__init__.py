"""`spurline data`: the first rows as they will be trained, token by token."""
