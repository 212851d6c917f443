"""How bytes cross a slow link in fewer bytes: exact deltas against a version the reader holds, and compression."""
