"""`tensorhub simulate`: the production planner and transfers on a modelled cluster, in virtual time.

Where the simulator beside it looks for wrong bytes, this one counts seconds and bytes, for thousands of GPUs.
"""
