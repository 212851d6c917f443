"""How many instances there are to be, by StreamRL's rules: before a job (`allocate`) and from step to step. Pure.

`job` and `comparison` import it. It imports `config` and `models`.

Seams: `allocate`, `fleet_size`, `profile`.
"""
