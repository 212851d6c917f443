"""Kernels in CUDA C++, compiled for the GPU at hand when they are first wanted; cupy keeps what it has compiled.

Each has the same results, bit by bit, as the host's work of the same name.
"""
