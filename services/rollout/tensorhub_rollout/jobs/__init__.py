"""One job's rollouts on the bus: its log is followed and folded, and while this manager leads its leader is driven.

`app` imports it. It imports all that decides, and decides nothing itself.

Seams: `ages`, `response_spans`, `runner_outbox`.
"""
