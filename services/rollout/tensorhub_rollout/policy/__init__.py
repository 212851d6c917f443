"""Who generates what, and where: policies as functions of a view of the fleet. Pure.

The leader checks every action, so that a policy can be slow but never wrong. `app` imports it, and the simulator drives
it.

Seams: `activation`, `allocation`, `balancing`, `dispatch`, `lengths`, `placing`, `plateau`,
`ranking`, `scale`, `seeding`, `skew`, `view`.
"""
