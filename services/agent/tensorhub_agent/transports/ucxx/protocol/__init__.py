"""Frames and message plans of the ucxx transport. Pure.

`transports.ucxx` imports it; its tests need no UCX.
"""
