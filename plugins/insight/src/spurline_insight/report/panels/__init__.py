"""Report panels about any run, one file per subject; `plugin.py` names them."""
