"""An agent in one job as a state machine: events in, effects out. Pure.

The driver in `jobs` and the simulator drive it.
"""
