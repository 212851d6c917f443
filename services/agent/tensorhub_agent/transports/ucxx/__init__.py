"""The transport between hosts: UCX in a thread of its own.

`transports.registry` and `app` import it.
"""
