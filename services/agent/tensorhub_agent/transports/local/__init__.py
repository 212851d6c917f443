"""The transport between agents of one host: a shared segment, and a unix socket for messages.

`transports.registry`, `sources` and `app` import it.
"""
