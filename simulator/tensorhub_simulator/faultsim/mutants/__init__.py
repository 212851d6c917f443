"""Planted bugs: each replaces a piece of production code by a wrong one, which a seed must find.

The runner imports it.
"""
