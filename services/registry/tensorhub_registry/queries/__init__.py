"""Answers what anyone asks of a job's catalog. `app` imports it.

Seams: `views`.
"""
