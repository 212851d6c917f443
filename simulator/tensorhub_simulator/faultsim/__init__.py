"""The production cores under faults drawn from one seed. `__main__` and tests import it."""
