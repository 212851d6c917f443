"""Bounds, places, piece sizes and sets of layouts. Pure.

Every package of the planner may import it; it imports none of them.
"""
