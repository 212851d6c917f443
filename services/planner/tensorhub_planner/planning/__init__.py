"""Decides who reads what from whom. Pure. `context` and `app` import it, and the simulator drives it.

Seams: `cost_model`, `decision`, `plan`, `plan_cache`, `request`, `selection`, `verifier`.
"""
