"""The decisions of one agent in one job: its shards, its calls and its membership in the log.

Pure; it may import `leases`, `transfer` and what is below them, and drivers (`jobs`, `control`, the simulator) import
it.
"""
