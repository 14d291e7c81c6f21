"""Kernels written in Numba; compiled to object code by `pyggml.backends.cpu.library`."""
