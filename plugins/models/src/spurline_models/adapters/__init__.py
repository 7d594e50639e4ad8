"""LoRA: what gets adapters, their layers, and their files."""
