"""One module for each call that is in progress on a shard, and the parts that they share.

Pure; they import `core.shard` and below, and only `core.agent` selects among them.
"""
