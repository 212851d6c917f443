"""The systems that are compared: `systems` has a row for each, and the others what these do that a manager doesn't.

`comparison` imports it. It imports `job` and what that stands on.

Seams: `balanced`, `in_turns`, `laminar`, `polyrl`, `rounds`, `seer`, `systems`.
"""
