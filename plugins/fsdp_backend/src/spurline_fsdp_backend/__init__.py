"""Spurline on many ranks with FSDP2."""
