"""Token cache: tokens on disk, found by what they were made of and read memory-mapped."""
