"""How a process that folds a job's log begins from a snapshot, and when it tries again a job that it has set aside.

Registry and planner import it.
"""
