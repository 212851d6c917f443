"""What surrounds the production cores, modelled: engines, machines, transfers, lengths, and a trainer's steps.

`job` puts it together. It imports `config`.

Seams: `arrivals`, `draws`, `engine_model`, `machine`, `step_progress`.
"""
