"""How fast a job of rollouts is (`tensorhub simulate rollout`): the production cores on modelled engines and machines.

`__main__` is the command; `job` has the world, `machine` an instance, `trainer` what takes responses, `engine_model`
how long steps take, `spot` when machines come and go, `arrivals` when they have a version, `config` a scenario's file,
`draws` how long responses are, `cases` what is run, `tables` and `picture` what came of that. `offline` has placements
by lengths that are known.

Seams: `__main__`, `arrivals`, `cases`, `config`, `draws`, `engine_model`, `job`, `offline`, `spot`, `weights`.
"""
