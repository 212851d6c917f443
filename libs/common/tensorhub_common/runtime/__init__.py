"""What runs under everything else: supervised background work, framed sockets, bounded gathering, locks on segments.

Every package with I/O may import it; it imports none of them.
"""
