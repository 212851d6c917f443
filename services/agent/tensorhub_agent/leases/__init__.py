"""Who may read which memory: leases, the table of them, and the load of each reader. Pure. `core` imports it."""
