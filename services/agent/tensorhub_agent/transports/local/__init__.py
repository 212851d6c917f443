"""The transport between agents of one host: a shared segment, and a unix socket for messages.

`transports.registry` imports it.
"""
