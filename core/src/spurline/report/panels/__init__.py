"""Core's report panels, one file per subject; `builtin.py` names them."""
