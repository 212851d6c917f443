"""The runner as a process: the core on the bus, the engine in its thread, and the weights that it follows.

Nothing imports it. It imports `core` and `engines`. Seams: `engines`.
"""
