"""The SDK's conversation with the agent: one connection, the shards on it, and one call at a time for each shard.

No torch and no NATS; `aio` imports it.
"""
