"""How fast the inner loops are, each alone: copies, casts, strided gathers, patches, and the transfer's decisions.

Each file is a program, as in `python benchmarks/kernels/copying.py`, and prints its figures beside memcpy's.
"""
