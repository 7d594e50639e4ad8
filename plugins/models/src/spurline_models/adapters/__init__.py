"""LoRA adapters: the choice of modules, the layers, and the files."""
