"""Further objectives of reinforcement learning: trust regions, masks and targets."""
