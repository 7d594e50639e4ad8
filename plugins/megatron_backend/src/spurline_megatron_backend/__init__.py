"""Spurline on many ranks with Megatron-core."""
