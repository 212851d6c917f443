"""The log of a job's rollouts, folded: who wants which responses, what is kept of them, and how they ended. Pure.

Every manager folds the same log to the same state, the leading one too. `core`, `jobs` and `app` import it, and the
simulator drives it. It imports nothing of this service.

Seams: `fold`, `outcomes`, `state`, `transitions`.
"""
