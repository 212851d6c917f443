"""Makes transfer programs from layouts. Pure. `planning` and `context` import it.

Seams: `compiler`, `layout_index`, `layout_reader`, `memo`.
"""
