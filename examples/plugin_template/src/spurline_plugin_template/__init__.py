"""A Spurline plugin to copy from. Start reading at `plugin.py`."""
