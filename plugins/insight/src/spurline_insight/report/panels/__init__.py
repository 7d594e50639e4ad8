"""The panels of this package; `plugin.py` names them."""
