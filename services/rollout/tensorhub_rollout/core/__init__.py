"""What a rollout manager decides while it leads: where requests go, what of their tokens counts, how they end. Pure.

`app` imports it, and the simulator drives it.

Seams: `answers`, `decisions`, `leader`, `leader_events`, `lengths`, `open_requests`, `response_story`,
`seeding_watch`, `version_arrivals`, `version_holds`, `waiting`, `why`.
"""
