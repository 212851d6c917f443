"""What one rollout manager relays: instances, responses and tokens a second, with its processor, memory and latency.

`python -m benchmarks.rollouts [--docs]` starts a hub with a manager, and instances without engines in processes of
their own.
"""
