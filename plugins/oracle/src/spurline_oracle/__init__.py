"""Check the gradients of any training stack against the fp64 truth of the same batch."""
