"""What held-out data say of a run, and what follows."""
