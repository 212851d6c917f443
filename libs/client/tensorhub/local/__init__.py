"""`tensorhub up`: a whole hub on one machine, for trying out, for tests and for small runs."""
