"""How a process that folds jobs' logs lists them, follows each, and tries again a job that it has set aside.

Registry and planner import it.
"""
