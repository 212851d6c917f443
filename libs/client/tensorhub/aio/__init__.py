"""The asyncio form of the SDK: a hub and its shards. `sync`, `cli`, `demo` and the package itself import it."""
