"""Benchmarks: each folder measures one thing. `make bench` and `python -m benchmarks` run `side_by_side`.

`fleet` and `worker` are the processes that they share, `llama` the model, `page` writes tables into
docs/design/benchmarks.md.
"""
