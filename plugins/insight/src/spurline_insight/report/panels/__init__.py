"""Draw report panels for any run, one file per subject; `plugin.py` names them."""
