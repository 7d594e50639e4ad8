"""Core's backends, one folder each."""
