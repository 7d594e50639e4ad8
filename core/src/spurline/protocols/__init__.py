"""One small file per component kind: what an implementation must provide."""
