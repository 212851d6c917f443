"""One read of one shard: its sources, what each is asked for, when one is given up. Pure.

`core.operations` and the simulator's performance model drive it.
"""
