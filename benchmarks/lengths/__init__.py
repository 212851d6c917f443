"""How well the lengths of responses are predicted, by what is known of them: `python -m benchmarks.lengths FILE...`.

A trace is replayed in its order: each response is predicted with what came before it, and learnt from afterwards.
"""
