"""The CPU backend: what each op means, compiled by numba from resident integers."""
