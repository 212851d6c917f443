"""The registry as a process, and its lease of leadership.

Nothing imports it but `__main__` and the console script.
"""
