"""Sessions: which call goes on from which, with which tokens, and which trajectories they make. Pure.

`app`, `api` and `chat` import it. It imports nothing of the rest.

Seams: `extension`, `messages`, `session`, `table`, `tools`.
"""
