"""What an agent says and asks over NATS: commands, plans, leases, heartbeats, programs.

`sources`, `jobs` and `app` import it.
"""
