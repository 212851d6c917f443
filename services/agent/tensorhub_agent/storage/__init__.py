"""The memory that shards live in: segments, manifests, adoption after a restart, copies in memory and on disk.

`transports`, `deltas`, `control`, `sources`, `jobs` and `app` import it; it imports no transport and no NATS.
"""
