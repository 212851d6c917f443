"""The rollout manager as a process: its lease, its subscriptions, and the jobs that it follows.

Nothing imports it. It imports everything below.
"""
