"""Runs seeds, counts what they reached, and reports. `__main__` imports it."""
