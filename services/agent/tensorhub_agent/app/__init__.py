"""The agent as a process: its service, its address, its metrics.

Nothing imports it but `__main__` and the console script.
"""
