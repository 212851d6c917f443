"""The settings that processes read from the environment, and how each value is read.

Programs and `connect()` import it; whatever they start gets its settings as arguments.
"""
