"""Memory of GPUs as the agent has it: regions of it, and the copies and digests that a GPU computes on them.

`compute` and what is above it import it; it imports `primitives` and `runtime` alone.
"""
