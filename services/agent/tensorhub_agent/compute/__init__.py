"""Work on bytes in threads: the copy pool, strided copies, conversions, amax tables.

Transports, storage and the packages above them import it; pure packages don't.
"""
