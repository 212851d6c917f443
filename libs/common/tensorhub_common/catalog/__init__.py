"""The catalog: the pure fold over a job's commands that says who holds which version."""
