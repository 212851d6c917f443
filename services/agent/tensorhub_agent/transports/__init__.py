"""How bytes and lease messages move between two agents: what all transports share, and which there are.

`sources` and `app` import it; no transport imports another.
"""
