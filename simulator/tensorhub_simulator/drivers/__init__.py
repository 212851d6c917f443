"""One driver for each core of production, in virtual time. The fault simulator and tests use them.

A driver carries out what its core wants, as production does, and checks what must hold after every step.
"""
