"""Systems beside each other: what is run of a scenario, and what is told of it: tables, JSON and pictures.

`__main__` imports it. It imports all below.

Seams: `cases`.
"""
