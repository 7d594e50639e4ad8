"""Train reward models on pairs or scored steps, and use them as rewards."""
