"""What a rollout manager decides: the fold of a job's rollouts and its states. Pure.

`app` imports it, and the simulator drives it.

Seams: `answers`, `decisions`, `fold`, `leader`, `leader_events`, `lengths`,
`outcomes`, `response_story`, `seeding_watch`, `state`, `transitions`, `version_arrivals`, `version_holds`,
`waiting`, `why`.
"""
