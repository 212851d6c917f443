"""How fast a job of rollouts is (`tensorhub simulate rollout`): the production cores on modelled engines and machines.

`__main__` is the command; `job` has the world, `machine` an instance, `trainer` what takes responses, `rounds` one that
takes them in RollPacker's rounds, `engine_model` how long steps take, `spot` when machines come and go, `fleet_size`
how many there are to be, `arrivals` when they have a version, `config` a scenario's file, `draws` how long responses
are, `cases` what is run, `tails` when a step's responses were whole, `limits` how soon they could have been, `ages` how
old their tokens were, `tables` and `picture` what came of it all.
`polyrl` has a job as the code released for RLBoost runs it, `laminar` one with Laminar's relays and its repack.
`allocate` divides a scenario's instances by its `profile`. `baselines` and `offline` have placements for comparison,
the latter by lengths that are known.

Seams: `__main__`, `ages`, `allocate`, `arrivals`, `baselines`, `cases`, `config`, `draws`, `engine_model`, `job`,
`laminar`, `limits`, `machine`, `offline`, `polyrl`, `profile`, `rounds`, `spot`, `tails`, `trainer`, `weights`.
"""
