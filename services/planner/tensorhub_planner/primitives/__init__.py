"""Bounds, places, piece sizes and sets of layouts. Pure.

Every package of the planner may import it; it imports none of them.

Seams: `limits`, `piece_sizes`, `source_set`, `topology`.
"""
