"""Engines that are servers of their own: what a runner asks of one, and how each kind is asked.

`server` is what every server promises. Nothing here knows the leader, requests or their rules: `app` drives a server
with what the core wants done.

Seams: `http`, `server`, `sglang`, `vllm`, `vllm_in_process`, `vllm_sampling`.
"""
