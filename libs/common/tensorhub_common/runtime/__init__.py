"""What runs under everything else: supervised work, framed sockets, bounded gathering, locks on segments, descriptors.

Every package with I/O may import it; it imports none of them.
"""
