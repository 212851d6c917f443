"""Values and arithmetic that every other package uses: ids, ranges, forms, deadlines and lease messages.

Pure; it imports nothing of the agent.
"""
