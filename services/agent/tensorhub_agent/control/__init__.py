"""All that an agent says and asks over NATS: commands, plans, leases, heartbeats, programs.

`jobs` and `app` import it.
"""
