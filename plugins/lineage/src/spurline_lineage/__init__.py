"""Hashes of what each step read and made, and the commands that fork, recompute and explain runs."""
