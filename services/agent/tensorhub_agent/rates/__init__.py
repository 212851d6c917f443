"""How fast a source and a link are, and which encoding that makes worth while. Pure.

`transfer`, `core`, `control` and `sources` import it.
"""
