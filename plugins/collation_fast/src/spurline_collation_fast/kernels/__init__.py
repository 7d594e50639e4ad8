"""The innermost loops of collation (`loops`), compiled by numba (`compiled`)."""
