"""Show kept rollouts in `spurline view`: lists of attempts, one attempt token by token, and differences."""
