"""Questions to all processes of a hub at once: pings, activity, and recent spans.

Services answer them, and the commands ask them.
"""
