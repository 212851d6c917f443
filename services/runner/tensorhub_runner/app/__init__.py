"""The runner as a process: the core on the bus, the engine in its thread, and the weights that it follows.

Nothing imports it but the SDK, which finds `local_instance` and `engines` by their names. It imports `core` and
`engines`.

Seams: `engines`, `local_instance`, `server_driver`.
"""
