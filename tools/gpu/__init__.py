"""`make gpu`: everything that only a machine with a GPU can show."""
