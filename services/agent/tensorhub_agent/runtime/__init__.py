"""What runs under the agent's I/O: shielded waiting, a timer, counts of rejections and troubles.

Every package of the agent with I/O may import it.
"""
