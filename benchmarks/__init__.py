"""Benchmarks: TensorHub, its peers and the physical limit, from one run."""
