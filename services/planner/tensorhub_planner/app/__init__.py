"""The planner as a process. Nothing imports it but `__main__` and the console script."""
