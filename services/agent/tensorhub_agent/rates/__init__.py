"""How fast links and sources are, and which encoding that suggests.

Pure; it may import `primitives`, and everything above may import it.
"""
