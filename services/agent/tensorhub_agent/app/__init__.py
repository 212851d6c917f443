"""The agent as a process: its service, its lease router, its address, its metrics.

`__main__` and the console script import it, and no package of the agent does.
"""
