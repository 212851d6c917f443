"""Sources of reads as the driver has them: their sessions, and the batches that are read from them.

`jobs` imports it.
"""
