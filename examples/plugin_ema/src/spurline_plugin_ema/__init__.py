"""A Spurline plugin that keeps an average of the trained weights. Start reading at `plugin.py`."""
