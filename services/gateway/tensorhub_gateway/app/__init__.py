"""The gateway as a server in its trainer's process: HTTP, the calls that are under way, the loops that carry them. I/O.

The SDK finds `gateway` by its name; nothing else imports it. It imports the SDK, `chat`, `api` and `sessions`.

Seams: `gateway`.
"""
