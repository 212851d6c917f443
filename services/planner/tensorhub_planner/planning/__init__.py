"""Decides who reads what from whom. Pure. `context` and `app` import it, and the simulator drives it."""
