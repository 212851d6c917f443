"""One read of one shard: which piece comes from which source, and when a piece counts.

Pure; it may import `rates` and `primitives`, and `core.operations` drives it.
"""
