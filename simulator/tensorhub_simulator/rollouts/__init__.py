"""Rollouts under faults: the production cores of manager and runner, driven by one seed.

`python -m tensorhub_simulator.rollouts` runs seeds. Only tests import it.
"""
