"""What `tensorhub doctor` checks: the hub, the machine, and the ways between hosts.

`cli.commands.doctor` imports it.
"""
