"""The sources of reads: their sessions, and the batches that are read from them.

`jobs` imports it.
"""
