"""What the SDK asks of the hub over NATS: where it is, its versions and replicas, and the events of a job.

No torch and no agent; `aio`, `local` and `cli` import it.
"""
