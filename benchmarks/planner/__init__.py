"""How long it takes to plan the resharding of a model of 10^12 parameters.

`python -m benchmarks.planner.planning` plans on one core; `python -m benchmarks.planner.planning_asked` asks over NATS.
"""
