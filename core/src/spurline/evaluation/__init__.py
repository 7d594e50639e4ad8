"""Held-out evaluations: loss on tokens, and scores of generated answers. That by rollouts is in `spurline.rl`."""
