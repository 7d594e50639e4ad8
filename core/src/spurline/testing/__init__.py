"""The contract kit that ships to plugin authors: subclass a suite, provide your component, run pytest."""
