"""The synchronous form of the SDK: the same objects over an event loop in a thread of its own.

The package itself and the demo import it.
"""
