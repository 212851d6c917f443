"""The driver of one job: worker sessions, pending calls and the effects of the core.

It may import every package except `app`, which starts it.
"""
