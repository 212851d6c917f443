"""The modelled cluster: network, topology, planner, shards, generation, spot machines.

The commands of `performance` import it.
"""
