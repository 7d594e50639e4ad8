"""Core's rewards."""
