"""Which deltas of a publication exist, and how they are made. `sources` and `jobs` import it."""
