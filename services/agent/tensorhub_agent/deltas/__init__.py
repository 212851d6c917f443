"""How deltas of publications are made, and what one job offers of them.

`control`, `sources` and `jobs` import it.
"""
