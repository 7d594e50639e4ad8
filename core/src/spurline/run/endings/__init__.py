"""How a run ends: when it is done, when it is asked to, and when it fails."""
