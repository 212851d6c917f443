"""The tensors of one shard, their pieces, parts and casts, and the digest that names them. Pure.

Everything above the protocol imports it.
"""
