"""Who reads from whom just now, as plans promised it and as agents report it. Pure.

`planning` and `context` import it.

Seams: `ledger`, `load`.
"""
