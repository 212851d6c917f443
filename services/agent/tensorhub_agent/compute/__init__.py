"""Work on bytes in threads: copies, strided copies, conversions, amax tables.

Transports, storage and what drives them import it; pure packages don't.
"""
