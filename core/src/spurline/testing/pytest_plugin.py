"""Loaded by pytest wherever spurline is installed."""
