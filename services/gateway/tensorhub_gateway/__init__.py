"""The gateway: agents and tools call it as they call OpenAI, and their trainer gets tokens (docs/guides/agents.md)."""
