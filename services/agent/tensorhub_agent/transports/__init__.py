"""How bytes and lease messages move between two agents: what all transports share, and the registry of them.

`sources`, `control` and `app` import it; no transport imports another.
"""
