"""One file per component kind: what an implementation must provide, and what its config declares."""
