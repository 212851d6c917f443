"""How many commands a second one registry decides, how long a restart takes, and how soon a successor leads.

`python -m benchmarks.registry [--docs]` starts NATS and registries as processes, and takes five minutes.
"""
