"""Who generates what, and where: policies as functions of a view of the fleet. Pure.

The leader checks every action, so that a policy can be slow but never wrong. `app` imports it, and the simulator drives
it.

Seams: `activation`, `allocation`, `arrival`, `balancing`, `dispatch`, `finish_times`, `fleet_loads`, `lengths`,
`moving`, `placing`, `plateau`, `prompt_lengths`, `rank_order`, `ranking`, `request_facts`, `retention`, `rolling`,
`scale`, `seeding`, `seeding_end`, `skew`, `view`, `waiting_order`.
"""
