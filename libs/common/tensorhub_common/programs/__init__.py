"""Transfer programs: how a shard is filled from shards of other layouts and dtypes. Pure.

The planner makes them, and the agent carries them out.
"""
