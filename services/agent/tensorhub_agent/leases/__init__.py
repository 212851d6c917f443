"""The leases of readers on this agent's shards, and the deltas that may go with them.

Pure; it may import `primitives`, `rates` and `encodings`, and knows nothing of reads.
"""
