"""The leader of a job's rollouts: where requests go, which tokens count, how they end. Pure.

It decides no placement by itself: `decisions` has the policies that do. `answers`, `decisions`, `jobs` and `app`
import it, and the simulator drives it.

Seams: `leader`, `leader_events`, `lengths`, `open_requests`, `responses`, `version_arrivals`, `waiting`.
"""
