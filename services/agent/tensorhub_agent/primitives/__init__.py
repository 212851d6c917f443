"""Values and small structures that everything else of the agent is made of: ids, ranges, forms, deadlines. Pure.

Every package of the agent may import it; it imports none of them.
"""
