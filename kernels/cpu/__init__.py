"""The CPU backend: what each op means, compiled by numba from resident integers."""

# Before any other module of this folder is read.
from shardline.kernels.cpu import sources as sources
