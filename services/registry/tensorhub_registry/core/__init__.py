"""What a registry decides: the fold of a job, election, liveness, snapshots, what is forgotten or ends. Pure.

`jobs`, `queries` and `app` import it, and the simulator drives it.

Seams: `agent_forgetting`, `election`, `hold_ending`, `job_fold`, `job_health`, `liveness`, `log_entries`,
`snapshot_policy`, `term_fence`.
"""
