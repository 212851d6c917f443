"""Memory of GPUs and the order of work on it: allocations that processes share, copies, streams and events.

The agent and `tensorhub._tensors` import it, and nothing of common does. `cuda` is the driver's; `fake` stands in for
it where there is no GPU.
"""
