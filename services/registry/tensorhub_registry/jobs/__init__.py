"""One job at a registry: follows its log, publishes outcomes, keeps snapshots, expires agents.

`queries` and `app` import it.

Seams: `deletion`, `job`, `snapshot_maker`, `term_claim`.
"""
