"""One driver for each core of production, in virtual time. Tests use them, and the fault simulator that of the planner.

A driver carries out what its core wants, as production does, and checks what must hold after every step.
"""
