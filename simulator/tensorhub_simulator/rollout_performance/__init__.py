"""How fast a job of rollouts is (`tensorhub simulate rollout`): the production cores on modelled engines and machines.

`__main__` is the command; `job` has the world, `machine` an instance, `trainer` what takes responses, `engine_model`
how long steps take, `spot` when machines come and go, `config` a scenario's file.

Seams: `__main__`, `config`, `engine_model`, `job`, `spot`.
"""
