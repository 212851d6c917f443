"""What the SDK, a rollout manager and runners say of rollouts. Pure.

`entries` are the log of a job's rollouts. docs/design/rollouts/log.md says what the fold makes of each.
"""
