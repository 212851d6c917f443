"""The memory that shards live in: segments, manifests, copies in memory and on disk.

`jobs`, `sources` and `control` import it.
"""
