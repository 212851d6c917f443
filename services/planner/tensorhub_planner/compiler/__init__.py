"""Makes transfer programs from layouts. Pure. `planning` and `context` import it."""
