"""The innermost loops of collation (`loops`), compiled by numba (`compiled`), and the plan of packed rows."""
