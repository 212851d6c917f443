"""What the planner reads from a job's catalog.

Its replica of it, the holders of a version, the programs needed next. Pure. `planning` and `context` import it.

Seams: `catalog_replica`, `holders`, `upcoming_programs`.
"""
