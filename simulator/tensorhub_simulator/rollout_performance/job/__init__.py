"""One job in virtual time, whatever system drives it.

`systems` says how they differ. It imports all below.

Seams: `job`.
"""
