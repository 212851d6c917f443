"""What runs under the agent's I/O: a socket server, shielded waiting, a timer, counts of rejections and troubles.

Every package of the agent with I/O may import it.
"""
