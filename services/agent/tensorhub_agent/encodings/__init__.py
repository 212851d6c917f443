"""Encodings that bring a piece in fewer bytes: exact patches against a version that the reader holds, and compression.

`transports`, `deltas` and `sources` import it; it imports `compute` alone.
"""
