"""What a registry decides: the fold of a job, election, liveness, snapshots, forgetting. Pure.

`jobs`, `queries` and `app` import it, and the simulator drives it.
"""
