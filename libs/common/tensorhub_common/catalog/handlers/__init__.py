"""What each command does to the catalog, a file for each noun. Pure.

`catalog.apply` and `catalog.reconcile` import it.
"""
