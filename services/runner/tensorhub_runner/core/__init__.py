"""What a runner decides: which attempts it holds, when each begins, which tokens it has sent. Pure.

`app` imports it, and the simulator drives it.

Seams: `runner`, `runner_events`.
"""
