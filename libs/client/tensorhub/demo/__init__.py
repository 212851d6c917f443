"""`tensorhub demo`: two programs to copy from, `trainer` and `rollout`, and `run`, which runs and checks them.

`model` is what they train and generate with; `verify` compares every byte.
"""
