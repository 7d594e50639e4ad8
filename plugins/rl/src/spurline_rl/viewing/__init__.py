"""What `spurline view` shows of kept rollouts: lists of attempts, one attempt token by token, and differences."""
