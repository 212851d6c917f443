"""How fast a job of rollouts is (`tensorhub simulate rollout`): the production cores on modelled engines and machines.

`__main__` is the command. From what a file says to what is told of it: `config` (a scenario), `models` (engines,
machines, transfers, lengths, a trainer's steps), `measures` (what came of a run), `sizing` (how many instances there
are to be), `job` (the world: one scenario driven by one system), `systems` (all that are compared), `comparison` (what
is run, and its tables and pictures). Each imports only what stands before it.

Seams: `__main__`.
"""
