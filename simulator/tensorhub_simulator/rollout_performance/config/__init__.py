"""A scenario: what its file says, what may be wrong with that, and recorded traces of spot machines. Pure.

Everything of `rollout_performance` imports it.

Seams: `decoding`, `engine_costs`, `scenario`, `spot_trace`, `weights`.
"""
