"""Modelled surroundings: the log, snapshots, segments, the network, layouts.

Nodes, transfers and the world import it.
"""
