"""One call on one shard each: register, publish, drain, read. Pure. `core.agent` begins them."""
