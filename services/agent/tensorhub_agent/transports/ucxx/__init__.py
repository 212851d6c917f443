"""The transport between hosts: UCX in a thread of its own. `transports.registry` imports it."""
